"""What the conformance kit does not ask of the TensorFlow replica groups, against one replica alone.

All checks of a backend are made in one run: each on new groups of its replicas. What they are compared
with, one replica alone finds in process 0 of the first run. Run as a program, this file is one process of a
run whose other process never comes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
from integration.tensorflow_group_checks import make_checks
from integration.tensorflow_group_run import CHECKS, RUNS, make_spec

import isotrain
from isotrain.adapters.tensorflow.adapter import TFMirrored, TFMultiWorker
from isotrain.core.contracts.backend.replica import Replica
from isotrain.core.contracts.plan import BackendConfig
from isotrain.core.contracts.process import ProcessContext, ProcessInfo
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.launching.processes.ports import Ports
from isotrain.core.spec.loading import load_spec
from isotrain.testing import launching


@functools.cache
def launched(backend: str, replicas: int) -> launching.Run:
    """A run of a backend; all are compared with the one replica of the first."""
    first = RUNS[0]
    known = () if (backend, replicas) == first else launched(*first).returned
    alone = known[0][1] if known else {}
    work = functools.partial(make_checks, alone=alone)
    nowhere = "http://127.0.0.1:9"  # who goes through this proxy reaches nobody
    with mock.patch.dict(os.environ, http_proxy=nowhere, no_proxy="elsewhere"):
        return launching.try_run(work, make_spec(), backend, replicas)


def problems(backend: str, replicas: int) -> dict[str, str]:
    """What is wrong in a run of a backend, by the name of the check."""
    run = launched(backend, replicas)
    if run.failure is not None:
        return dict.fromkeys(CHECKS, run.failure)
    told = [(rank, *item) for rank, (found, _) in enumerate(run.returned) for item in found.items()]
    return {name: "".join(f"\nrank {r}:\n{t}" for r, n, t in told if n == name) for name in CHECKS}


@pytest.mark.features
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(("backend", "replicas"), RUNS)
def test_group_check(backend: str, replicas: int, name: str) -> None:
    found = problems(backend, replicas)[name]
    assert not found, found


def _used_by_first(replica: Replica, vector: Any) -> Any:
    """Calls collectives on a vector; replica 0 alone uses the results."""
    everyone = (tuple(range(replica.replicas)),)
    results = [
        replica.send_receive(vector, (1, 0)),
        replica.broadcast_within(vector, everyone),
        replica.all_gather_shards(vector, [2] * replica.replicas),
    ]
    return vector if replica.index else replica.ops.concatenate(results)


def use_results_on_rank_0(session: isotrain.Session) -> list[float]:
    """What replica 0 gets of vectors with the numbers of the replicas."""
    group = session.group
    vector = group.tensor(np.full(2, float(session.rank)))
    (result,) = group.compute(_used_by_first, [vector])
    return group.numpy(result).tolist()


@pytest.mark.features
@pytest.mark.parametrize("backend", ["tf-multiworker", "horovod-tf"])
def test_a_replica_takes_part_in_collectives_whose_results_it_does_not_use(backend: str) -> None:
    run = launching.try_run(use_results_on_rank_0, make_spec(), backend, 2)
    assert run.failure is None, run.failure
    assert run.returned == [[1, 1, 0, 0, 0, 0, 1, 1], [1, 1]]


def test_collectives_that_cannot_work_are_refused() -> None:
    for adapter in (TFMirrored(), TFMultiWorker()):
        with pytest.raises(UnsupportedError, match="CPUs"):
            adapter.resolve_collective("nccl", device="cpu", replicas=2)
        with pytest.raises(UnsupportedError, match="unknown collective 'gloo'"):
            adapter.resolve_collective("gloo", device="cpu", replicas=2)
        assert adapter.resolve_collective("auto", device="gpu", replicas=2) == "nccl"
    assert TFMultiWorker().resolve_collective(None, device="cpu", replicas=2) == "ring"
    assert TFMirrored().resolve_collective(None, device="cpu", replicas=3) == "one-device"
    with pytest.raises(UnsupportedError, match="odd number"):
        TFMirrored().resolve_collective("hierarchical-copy", device="cpu", replicas=3)


def test_options_are_checked() -> None:
    def notes(options: dict[str, Any]) -> list[str]:
        spec = load_spec(make_spec(backend_options={"tf-multiworker": options}))
        adapter = TFMultiWorker()
        return adapter.check(spec, adapter.check_options(spec), replicas=2)

    assert len(notes({"bucket_bytes": 1024})) == 1
    with pytest.raises(PlanError, match="at least 1, received 0"):
        notes({"bucket_bytes": 0})
    with pytest.raises(PlanError, match="bucket_bytes"):
        notes({"bucket_byte": 1024})


@pytest.mark.features
def test_a_peer_that_never_starts_ends_the_process() -> None:
    completed = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | TFMultiWorker().environment_variables(device="cpu", threads=1, replicas=1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 1
    assert "multi_worker_strategy" in completed.stderr, completed.stderr


def wait_for_a_peer() -> None:
    """Starts the first process of two, and waits for the other for a second."""
    with contextlib.closing(Ports()) as ports:
        addresses = tuple(("127.0.0.1", port) for port in ports.take(2))
        processes = tuple(ProcessInfo(rank, "here", rank, (rank,)) for rank in range(2))
        context = ProcessContext(0, 2, "", processes, addresses)
        spec = load_spec(make_spec(timeouts={"start": 1.0}))
        TFMultiWorker().start(spec, BackendConfig("ring", "cpu", 1, {}, 60.0), context)


if __name__ == "__main__":
    wait_for_a_peer()
