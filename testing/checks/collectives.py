"""Checks of the collectives against NumPy, with inputs that differ between replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import numpy as np

from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.backend.replica import Computation, ReduceOp, Replica, Tensor
from isotrain.testing.check_context import CheckContext, assert_same

CASES = (
    ("float64", ()),
    ("float32", (1,)),
    ("float32", (2, 3)),
    ("float64", (16411,)),
    ("int64", (2, 3)),
)
Case = tuple[str, np.dtype[Any], tuple[int, ...]]


def cases() -> Iterator[Case]:
    """Name, dtype and shape of each case, from a scalar to more than one packet."""
    for dtype, shape in CASES:
        yield f"{dtype}{list(shape)}", np.dtype(dtype), shape


def value(replica: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Input of a replica: small integers, so that sums are exact in every dtype and order."""
    numbers = (np.arange(int(np.prod(shape))) * 7 + replica * replica * 5) % 97 - 31 + replica
    return numbers.astype(dtype).reshape(shape)


def _compare(
    context: CheckContext,
    computation: Computation,
    ways: Sequence[Any],
    make: Callable[[int, Case], np.ndarray],
    expected: Callable[[Any, int, Case], np.ndarray],
    applies: Callable[[Case], bool] = lambda case: True,
) -> None:
    """Runs a collective in every way and on every case, all in one computation, and then compares.

    Args:
        context: Context of this process.
        computation: Computation on the tensors of the cases, with `ways` as `static`; returns for each way
            the list of results.
        ways: Operations, roots or distances to try.
        make: Function of a replica and a case that returns the input, of the case's shape and dtype.
        expected: Function of a way, a replica and a case that returns the expected result.
        applies: Function that selects the cases to run.
    """
    group, selected = context.group, [case for case in cases() if applies(case)]
    values = [[group.tensor(make(r, case)) for r in group.local_replicas] for case in selected]
    results = group.compute(computation, *values, static=tuple(ways))
    for replica, of_ways in zip(group.local_replicas, results, strict=True):
        for way, tensors in zip(ways, of_ways, strict=True):
            for case, tensor in zip(selected, tensors, strict=True):
                what = f"{way}: replica {replica}, {case[0]}"
                assert_same(group.numpy(tensor), expected(way, replica, case), what)


def _input(replica: int, case: Case) -> np.ndarray:
    """Input of a replica, of the case's shape and dtype."""
    return value(replica, *case[1:])


def _inputs(context: CheckContext, case: Case) -> np.ndarray:
    """Inputs of all replicas, stacked: shape `[replicas, *shape]`."""
    return np.stack([value(r, *case[1:]) for r in range(context.group.replicas)])


def _all_reduce(replica: Replica, *tensors: Tensor, static: Sequence[ReduceOp]) -> Any:
    """All-reduces tensors of any shapes by each operation of `static`."""
    return [[replica.all_reduce(tensor, op) for tensor in tensors] for op in static]


def _compare_reduced(
    context: CheckContext,
    op: ReduceOp,
    make: Callable[[int, Case], np.ndarray],
    expected: Callable[[Case], np.ndarray],
    applies: Callable[[Case], bool] = lambda case: True,
) -> None:
    """Checks an all-reduce of every case (shape, dtype) in a computation, and of the first one outside."""
    group, first = context.group, next(cases())
    outside = group.all_reduce([group.tensor(make(r, first)) for r in group.local_replicas], op)
    _compare(context, _all_reduce, (op,), make, lambda way, replica, case: expected(case), applies)
    for replica, tensor in zip(group.local_replicas, outside, strict=True):
        what = f"replica {replica}, outside of a computation"
        assert_same(group.numpy(tensor), expected(first), what)


def all_reduce_sum(context: CheckContext) -> None:
    """Every replica gets the sum."""
    _compare_reduced(
        context, "sum", _input, lambda case: _inputs(context, case).sum(axis=0, dtype=case[1])
    )


def all_reduce_mean(context: CheckContext) -> None:
    """Every replica gets the mean; inputs are multiples of the number of replicas, so it is exact."""
    _compare_reduced(
        context,
        "mean",
        lambda r, case: _input(r, case) * context.group.replicas,
        lambda case: _inputs(context, case).sum(axis=0, dtype=case[1]),
        lambda case: case[1].kind == "f",
    )


def all_reduce_max(context: CheckContext) -> None:
    """Every replica gets the elementwise maximum."""
    _compare_reduced(context, "max", _input, lambda case: _inputs(context, case).max(axis=0))


def _all_gather(replica: Replica, *tensors: Tensor, static: Sequence[str]) -> Any:
    """All-gathers tensors of any shapes, once for each entry of `static`."""
    return [[replica.all_gather(tensor) for tensor in tensors] for _ in static]


def all_gather(context: CheckContext) -> None:
    """Every replica gets the tensors of all, stacked in the order of the replicas."""
    _compare(context, _all_gather, ("all",), _input, lambda way, r, case: _inputs(context, case))


def collectives_overlap(context: CheckContext) -> None:
    """All-reduces and all-gathers that go on together are right, whatever order they are awaited in.

    Where these are asynchronous, the other processes take part after the first one has returned from both.
    """
    group = context.group
    tensors = {
        case: [group.tensor(_input(r, case)) for r in group.local_replicas]
        for case in cases()
        if case[1].kind == "f"
    }
    is_first = 0 in group.local_replicas
    waits = Capability.ASYNCHRONOUS_COLLECTIVES in context.supported
    if waits and not is_first:
        context.file_exchange.all_gather({})
    sums = {case: group.all_reduce_async(inputs) for case, inputs in tensors.items()}
    rows = {case: group.all_gather_async(inputs) for case, inputs in tensors.items()}
    if waits and is_first:
        context.file_exchange.all_gather({})
    group.barrier()
    for case in reversed(tensors):
        inputs = _inputs(context, case)
        gathered, total = rows[case](), sums[case]()
        for index, replica in enumerate(group.local_replicas):
            what = f"replica {replica}, {case[0]}"
            assert_same(group.numpy(gathered[index]), inputs, f"all-gather: {what}")
            assert_same(group.numpy(total[index]), inputs.sum(axis=0), f"all-reduce: {what}")


def _broadcast(replica: Replica, *tensors: Tensor, static: Sequence[int]) -> Any:
    """Broadcasts tensors of any shapes from each root to all replicas that follow it."""
    subgroups_of_roots = [(tuple(range(root, replica.replicas)),) for root in static]
    return [
        [replica.broadcast_within(tensor, subgroups) for tensor in tensors]
        for subgroups in subgroups_of_roots
    ]


def broadcast_within(context: CheckContext) -> None:
    """Each replica in turn broadcasts to all that follow it; those before it keep their tensor."""
    roots = range(context.group.replicas)
    _compare(context, _broadcast, roots, _input, lambda root, r, case: _input(min(root, r), case))


def broadcast_keeps_bits(context: CheckContext) -> None:
    """Negative zero, infinities, NaN and the largest and smallest normal numbers arrive as sent."""
    group = context.group
    special = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 2.0**-1022, -1e308])
    inputs = [np.full(special.shape, 2.0 + r) if r else special for r in group.local_replicas]
    results = group.compute(_broadcast, list(map(group.tensor, inputs)), static=(0,))
    for ((tensor,),) in results:
        result = group.numpy(tensor)
        assert result.tobytes() == special.tobytes(), f"{result} != {special}"


def _ring_shift(replica: Replica, *tensors: Tensor, static: Sequence[int]) -> Any:
    """Sends tensors of any shapes around the ring by each distance."""
    n = replica.replicas
    rings = [tuple((r + distance) % n for r in range(n)) for distance in static]
    return [[replica.send_receive(tensor, ring) for tensor in tensors] for ring in rings]


def _send_constant(replica: Replica, tensor: Tensor) -> Tensor:
    """Sends a tensor of any shape around the ring; replica 0 sends zeros, which a compiler knows."""
    ring = tuple((index + 1) % replica.replicas for index in range(replica.replicas))
    zeros = replica.ops.zeros(tensor.shape, tensor.dtype)
    return replica.send_receive(tensor if replica.index else zeros, ring)


def send_receive(context: CheckContext) -> None:
    """Tensors go around the ring in both directions, and from each replica to itself.

    Constants arrive, too: a framework that takes the collective for one of its functions may not compute it
    in advance.
    """
    group, n = context.group, context.group.replicas
    for value in (1.0, 2.0):
        sent = [group.tensor(np.full(3, value)) for _ in group.local_replicas]
        for replica, arrived in zip(
            group.local_replicas, group.compute(_send_constant, sent), strict=True
        ):
            expected = np.full(3, value if (replica - 1) % n else 0.0)
            assert_same(
                group.numpy(arrived), expected, f"what replica {replica} gets of a constant"
            )
    _compare(
        context,
        _ring_shift,
        (0, 1, n - 1),
        _input,
        lambda way, r, case: _input((r - way) % n, case),
    )


def _collectives(
    replica: Replica, tensor: Tensor, *, static: Sequence[tuple[Computation, Sequence[int]]]
) -> Any:
    """Runs every collective of the backend on a tensor of any shape; `static` has the optional ones."""
    results = [_all_reduce(replica, tensor, static=get_args(ReduceOp))]
    results.append(_all_gather(replica, tensor, static=("all",)))
    return results + [computation(replica, tensor, static=ways) for computation, ways in static]


def _all_reduce_within(replica: Replica, *tensors: Tensor, static: Sequence[int]) -> Any:
    """All-reduces tensors of any shapes within the subgroup of all replicas."""
    all_replicas = (tuple(range(replica.replicas)),)
    return [[replica.all_reduce_within(tensor, all_replicas) for tensor in tensors] for _ in static]


def inputs_are_left_alone(context: CheckContext) -> None:
    """Collectives make new tensors and do not write into those they are given."""
    group, others = context.group, list[tuple[Computation, Sequence[int]]]()
    if Capability.SEND_RECEIVE in context.supported:
        others.append((_ring_shift, (1,)))
    if Capability.SUBGROUPS in context.supported:
        others += [(_broadcast, (0,)), (_all_reduce_within, (0,))]
    inputs = {r: value(r, np.dtype("float64"), (6,)) for r in group.local_replicas}
    tensors = [group.tensor(array) for array in inputs.values()]
    group.compute(_collectives, tensors, static=tuple(others))
    for replica, tensor in zip(inputs, tensors, strict=True):
        assert_same(group.numpy(tensor), inputs[replica], f"input of replica {replica}")


def barrier(context: CheckContext) -> None:
    """No process leaves the barrier before the last one has come; each in turn comes late."""
    session = context.session
    missing = []
    for late in range(len(session.plan.processes)):
        context.file_exchange.all_gather({})
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
