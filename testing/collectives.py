"""Checks of the collectives, with inputs that depend on the replica, against NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from isotrain.core.contracts.replica import ReduceOp
from isotrain.testing.bench import Bench, assert_same

CASES = (
    ("float64", ()),
    ("float32", (1,)),
    ("float32", (2, 3)),
    ("float64", (16411,)),
    ("int64", (2, 3)),
)
Case = tuple[str, np.dtype[Any], tuple[int, ...]]


def cases() -> Iterator[Case]:
    """Types and shapes, from a scalar to more than fits one packet."""
    for dtype, shape in CASES:
        yield f"{dtype}{list(shape)}", np.dtype(dtype), shape


def value(replica: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """A replica's input: small whole numbers, so that sums are exact in every type and order."""
    numbers = (np.arange(int(np.prod(shape))) * 7 + replica * replica * 5) % 97 - 31 + replica
    return numbers.astype(dtype).reshape(shape)


def _compare(
    bench: Bench,
    operation: Callable[[list[Any]], list[Any]],
    given: Callable[..., np.ndarray],
    expected: Callable[[int, Case], np.ndarray],
    wanted: Callable[[Case], bool] = lambda case: True,
) -> None:
    """Runs a collective on every case, and only then compares.

    Args:
        bench: Of this process.
        operation: The collective.
        given: Of a replica and a `case`, its input.
        expected: Of a replica and a case, what it must get.
        wanted: Which cases to run.
    """
    chosen = [case for case in cases() if wanted(case)]
    results = [bench.collective(operation, partial(given, case=case)) for case in chosen]
    for case, found in zip(chosen, results, strict=True):
        for replica, result in zip(bench.group.local_replicas, found, strict=True):
            assert_same(result, expected(replica, case), f"replica {replica}, {case[0]}")


def _inputs(bench: Bench, case: Case) -> np.ndarray:
    return np.stack([value(r, *case[1:]) for r in range(bench.group.replicas)])


def _exact_mean(case: Case) -> bool:
    return case[1].kind == "f"


def all_reduce_sum(bench: Bench) -> None:
    """Every replica gets the sum."""
    _compare(
        bench,
        lambda values: bench.group.all_reduce(values, "sum"),
        lambda r, case: value(r, *case[1:]),
        lambda r, case: _inputs(bench, case).sum(axis=0, dtype=case[1]),
    )


def all_reduce_mean(bench: Bench) -> None:
    """Every replica gets the mean; inputs are multiples of the number of replicas, so it is exact."""
    n = bench.group.replicas
    _compare(
        bench,
        lambda values: bench.group.all_reduce(values, "mean"),
        lambda r, case: value(r, *case[1:]) * n,
        lambda r, case: _inputs(bench, case).sum(axis=0, dtype=case[1]),
        _exact_mean,
    )


def all_reduce_max(bench: Bench) -> None:
    """Every replica gets the elementwise maximum."""
    _compare(
        bench,
        lambda values: bench.group.all_reduce(values, "max"),
        lambda r, case: value(r, *case[1:]),
        lambda r, case: _inputs(bench, case).max(axis=0),
    )


def inputs_are_left_alone(bench: Bench) -> None:
    """Collectives make new tensors and do not write into those they are given."""
    group = bench.group
    given = {r: value(r, np.dtype("float64"), (6,)) for r in group.local_replicas}
    tensors = [group.tensor(array) for array in given.values()]
    group.all_reduce(tensors, "sum")
    group.all_reduce(tensors, "mean")
    group.broadcast(tensors, 1)
    for replica, tensor in zip(given, tensors, strict=True):
        assert_same(group.numpy(tensor), given[replica], f"input of replica {replica}")


def all_gather(bench: Bench) -> None:
    """Every replica gets the tensors of all, stacked in the order of the replicas."""
    _compare(
        bench,
        bench.group.all_gather,
        lambda r, case: value(r, *case[1:]),
        lambda r, case: _inputs(bench, case),
    )


def _of_replica(root: int, replica: int, case: Case) -> np.ndarray:
    """The input of replica `root`, whoever asks."""
    return value(root, *case[1:])


def broadcast(bench: Bench) -> None:
    """From every root in turn, every replica gets the root's tensor."""
    failures = []
    for root in range(bench.group.replicas):
        try:
            _compare(
                bench,
                partial(bench.group.broadcast, root=root),
                lambda r, case: value(r, *case[1:]),
                partial(_of_replica, root),
            )
        except AssertionError as error:
            failures.append(f"root {root}: {error}")
    assert not failures, "\n".join(failures)


def broadcast_keeps_bits(bench: Bench) -> None:
    """Negative zero, infinities, NaN and the largest and smallest normal numbers arrive as sent."""
    special = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 2.0**-1022, -1e308])
    results = bench.collective(
        lambda values: bench.group.broadcast(values, 1),
        lambda r: special if r == 1 else np.full(special.shape, 2.0 + r),
    )
    for result in results:
        assert result.tobytes() == special.tobytes(), f"{result} != {special}"


def _scattered(bench: Bench, op: ReduceOp, factor: int) -> None:
    n = bench.group.replicas

    def given(replica: int, case: Case) -> np.ndarray:
        return value(replica, case[1], (2 * n, *case[2])) * factor

    def expected(replica: int, case: Case) -> np.ndarray:
        total = np.stack([given(r, case) for r in range(n)]).sum(axis=0, dtype=case[1])
        part: np.ndarray = (total // factor)[2 * replica : 2 * replica + 2]
        return part.astype(case[1])

    _compare(
        bench,
        lambda values: bench.group.reduce_scatter(values, op),
        given,
        expected,
        _exact_mean if op == "mean" else lambda case: True,
    )


def reduce_scatter_sum(bench: Bench) -> None:
    """Replica r gets the r-th part of the sum."""
    _scattered(bench, "sum", 1)


def reduce_scatter_mean(bench: Bench) -> None:
    """Replica r gets the r-th part of the mean."""
    _scattered(bench, "mean", bench.group.replicas)


def _of_neighbour(step: int, replicas: int, replica: int, case: Case) -> np.ndarray:
    """The input of the replica that is `step` before."""
    return value((replica - step) % replicas, *case[1:])


def send_receive(bench: Bench) -> None:
    """Around the ring in both directions."""
    group, n = bench.group, bench.group.replicas
    failures = []
    for step in (1, n - 1):
        destinations = [(r + step) % n for r in group.local_replicas]
        sources = [(r - step) % n for r in group.local_replicas]
        try:
            _compare(
                bench,
                partial(group.send_receive, destinations=destinations, sources=sources),
                lambda r, case: value(r, *case[1:]),
                partial(_of_neighbour, step, n),
            )
        except AssertionError as error:
            failures.append(f"step {step}: {error}")
    assert not failures, "\n".join(failures)


def barrier(bench: Bench) -> None:
    """Nobody leaves before the last one has come: each in turn comes late, and leaves a mark first."""
    session = bench.session
    missing = []
    for late in range(len(session.plan.processes)):
        bench.board.share({})
        if session.rank == late:
            time.sleep(0.25)
        (session.run_directory / f"arrived-{late}-{session.rank}").touch()
        session.barrier()
        missing += [
            f"process {session.rank} left before process {rank} came"
            for rank in range(len(session.plan.processes))
            if not (session.run_directory / f"arrived-{late}-{rank}").exists()
        ]
    assert not missing, missing
