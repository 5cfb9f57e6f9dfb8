"""Each of two hosts reads the shards of a stream that its replicas need."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import hosts, stream_job
from cluster.network import Network

import isotrain
from isotrain.core.checkpoints.folder import checkpoint_at

SLOTS = 2


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts, without launchers."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp") as folder,
        Network(Path(folder)) as made,
    ):
        yield made


def test_a_host_reads_the_shards_of_its_replicas(network: Network, tmp_path: Path) -> None:
    shared = network.folder / "shared"
    shared.mkdir()
    log = network.folder / "log"
    world = {"MASTER_ADDR": network.hosts[0].name, "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1}
    world |= {"WORLD_SIZE": 2 * SLOTS, "LOCAL_WORLD_SIZE": SLOTS, "TORCHELASTIC_RUN_ID": "stream"}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    ranks = []
    for rank in range(2 * SLOTS):
        node, local = divmod(rank, SLOTS)
        own = {**world, "RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node, "PYTHONPATH": path}
        variables = {name: str(value) for name, value in own.items()}
        command = [sys.executable, "-m", "cluster.stream_job", str(shared)]
        ranks.append(network.hosts[node].start(command, log, variables))
    assert [process.wait() for process in ranks] == [0] * len(ranks), log.read_text()
    opened = {f"node{1 + index // 4}-{index}" for index in range(stream_job.SHARDS)}
    assert {each.name for each in shared.glob("node*")} == opened
    facts = json.loads((shared / "facts.json").read_text())
    samples, size = stream_job.SHARDS * stream_job.LENGTH, 8 * (4 + 1)
    half = {"samples": samples, "bytes": samples * size}
    assert facts["read"] == {"node1": half, "node2": half}
    saved = checkpoint_at(shared / "run")
    assert [*saved.tensors("shards")] == ["rank-2"], "the first of the other host"
    alone = isotrain.run(
        stream_job.spec(str(tmp_path)), backend="torch-ddp", replicas=1, output=tmp_path / "run"
    )
    np.testing.assert_allclose(facts["loss"], alone.history.loss, rtol=1e-12)
