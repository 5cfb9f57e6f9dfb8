"""Processes that real engines start on two hosts are one run, with the losses of a run on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cluster import joined_job
from cluster.bed import Bed
from cluster.engines import ENGINES

SECONDS = 200.0
_JOB = str(Path(joined_job.__file__))
BACKENDS = "torch-ddp,horovod-torch"
STARTS = ("srun", "mpirun", "torchrun")


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one replica on this machine."""
    return joined_job.losses(tmp_path_factory.mktemp("local"), "torch-ddp", 1)


@pytest.mark.parametrize("name", STARTS)
def test_losses_are_those_of_one_machine(bed: Bed, local: list[float], name: str) -> None:
    folder = bed.folder / f"joined-{name}"
    folder.mkdir()
    log = folder / "log"
    started = ENGINES[name].start(bed, [bed.python, _JOB, str(folder), BACKENDS], log)
    try:
        statuses = started.wait(SECONDS)
    finally:
        started.end()
    assert not any(statuses), log.read_text()
    ranks = [json.loads(file.read_text()) for file in folder.glob("losses-of-*.json")]
    assert len(ranks) == 4, log.read_text()
    for rank in ranks:
        assert [*rank] == BACKENDS.split(",")
        for losses in rank.values():
            np.testing.assert_allclose(losses, local, rtol=1e-12, atol=0)
