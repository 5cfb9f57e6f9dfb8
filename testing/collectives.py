"""Checks of the collectives, with inputs that depend on the replica, against NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np

from isotrain.core.contracts.capabilities import Capability
from isotrain.core.contracts.replica import Computation, Parts, ReduceOp, Replica, Tensor
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


def _computing(
    bench: Bench, computation: Computation, static: Hashable = None
) -> Callable[[list[Any]], list[Any]]:
    """A collective of the replicas, from without."""
    return lambda values: bench.group.compute(computation, values, static=static)


def _gather(replica: Replica, tensor: Tensor) -> Tensor:
    return replica.all_gather(tensor)


def all_gather(bench: Bench) -> None:
    """Every replica gets the tensors of all, stacked in the order of the replicas."""
    _compare(
        bench,
        _computing(bench, _gather),
        lambda r, case: value(r, *case[1:]),
        lambda r, case: _inputs(bench, case),
    )


def _share(replica: Replica, tensor: Tensor, *, static: Parts) -> Tensor:
    return replica.broadcast_within(tensor, static)


def _sum(replica: Replica, tensor: Tensor, *, static: Parts) -> Tensor:
    return replica.sum_within(tensor, static)


def _of_root(root: int, replica: int, case: Case) -> np.ndarray:
    """The input of replica `root` for those that follow it, and the own one for those before it."""
    return value(min(root, replica), *case[1:])


def broadcast_within(bench: Bench) -> None:
    """From every replica in turn to all that follow it; those before it keep their own."""
    n = bench.group.replicas
    failures = []
    for root in range(n):
        try:
            _compare(
                bench,
                _computing(bench, _share, (tuple(range(root, n)),)),
                lambda r, case: value(r, *case[1:]),
                partial(_of_root, root),
            )
        except AssertionError as error:
            failures.append(f"root {root}: {error}")
    assert not failures, "\n".join(failures)


def broadcast_keeps_bits(bench: Bench) -> None:
    """Negative zero, infinities, NaN and the largest and smallest normal numbers arrive as sent."""
    special = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 2.0**-1022, -1e308])
    results = bench.collective(
        _computing(bench, _share, (tuple(range(bench.group.replicas)),)),
        lambda r: np.full(special.shape, 2.0 + r) if r else special,
    )
    for result in results:
        assert result.tobytes() == special.tobytes(), f"{result} != {special}"


def _of_neighbour(step: int, replicas: int, replica: int, case: Case) -> np.ndarray:
    """The input of the replica that is `step` before."""
    return value((replica - step) % replicas, *case[1:])


def _shift(replica: Replica, tensor: Tensor, *, static: Sequence[int]) -> Tensor:
    return replica.send_receive(tensor, static)


def send_receive(bench: Bench) -> None:
    """Around the ring in both directions."""
    n = bench.group.replicas
    failures = []
    for step in (1, n - 1):
        destinations = tuple((r + step) % n for r in range(n))
        try:
            _compare(
                bench,
                _computing(bench, _shift, destinations),
                lambda r, case: value(r, *case[1:]),
                partial(_of_neighbour, step, n),
            )
        except AssertionError as error:
            failures.append(f"step {step}: {error}")
    assert not failures, "\n".join(failures)


def _reduce_and_gather(replica: Replica, tensor: Tensor) -> list[Tensor]:
    return [
        *(replica.all_reduce(tensor, op) for op in get_args(ReduceOp)),
        _gather(replica, tensor),
    ]


def inputs_are_left_alone(bench: Bench) -> None:
    """Collectives make new tensors and do not write into those they are given."""
    group, everybody = bench.group, tuple(range(bench.group.replicas))
    given = {r: value(r, np.dtype("float64"), (6,)) for r in group.local_replicas}
    tensors = [group.tensor(array) for array in given.values()]
    group.compute(_reduce_and_gather, tensors)
    if Capability.SEND_RECEIVE in bench.supported:
        group.compute(_shift, tensors, static=(*everybody[1:], 0))
    if Capability.SUBGROUPS in bench.supported:
        group.compute(_share, tensors, static=(everybody,))
        group.compute(_sum, tensors, static=(everybody,))
    for replica, tensor in zip(given, tensors, strict=True):
        assert_same(group.numpy(tensor), given[replica], f"input of replica {replica}")


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
