"""Checks of computations on replicas against NumPy, with inputs that differ between replicas."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.replica import Replica, Subgroups, Tensor, local_subgroup
from isotrain.testing.check_context import CLOSE, CheckContext, assert_same
from isotrain.testing.checks import collectives

FLOAT64 = np.dtype("float64")
SHAPE = (2, 3)


def input_of(replica: int) -> np.ndarray:
    """Input of a replica, float64, shape `SHAPE`."""
    return collectives.value(replica, FLOAT64, SHAPE)


def _computed(context: CheckContext, computation: Any, static: Hashable = None) -> list[Any]:
    """Runs a computation on the input of each replica; returns the results of the local replicas."""
    tensors = [context.group.tensor(input_of(r)) for r in context.group.local_replicas]
    return context.group.compute(computation, tensors, static=static)


def _compare(
    context: CheckContext,
    computation: Any,
    expected: Callable[[int], np.ndarray],
    static: Hashable = None,
) -> None:
    """Runs a computation on every replica's input; compares with `expected`, float64 of any shape."""
    _assert_equal(context, _computed(context, computation, static), expected)


def _assert_equal(
    context: CheckContext, tensors: list[Any], expected: Callable[[int], np.ndarray]
) -> None:
    """Compares each local replica's result with its expected array, of one shape and dtype."""
    for replica, tensor in zip(context.group.local_replicas, tensors, strict=True):
        assert_same(context.group.numpy(tensor), expected(replica), f"replica {replica}")


def _inputs(context: CheckContext) -> np.ndarray:
    """Inputs of all replicas, float64, shape `[replicas, *SHAPE]`."""
    return np.stack([input_of(r) for r in range(context.group.replicas)])


def _add_index(replica: Replica, tensor: Tensor, *, static: float) -> Tensor:
    """Computation with the replica's index and the static factor; any shape."""
    return tensor * static + replica.index + replica.replicas


def computation(context: CheckContext) -> None:
    """Each replica computes with its own values, index and the static argument."""
    n = context.group.replicas
    for factor in (2.0, 3.0):

        def expected(replica: int, factor: float = factor) -> np.ndarray:
            return input_of(replica) * factor + replica + n

        _compare(context, _add_index, expected, factor)


def _double_weights(replica: Replica) -> list[Tensor]:
    """Computation that doubles the weights; returns vectors of the state before, after, and the weights."""
    before = replica.read(("trainable", "statistics"))
    weights = replica.read(("trainable",))
    replica.write(("trainable",), weights * 2)
    return [before, replica.read(("trainable", "statistics")), weights]


def computation_on_state(context: CheckContext) -> None:
    """A computation reads and sets its replica's weights and moving statistics, as vectors or ranges."""
    context.restart()
    start = context.session.read_state(("trainable",))
    results = context.group.compute(_double_weights)
    vectors = [[context.group.numpy(tensor) for tensor in tensors] for tensors in results]
    after = context.session.read_state(("trainable",))
    sorted_start = np.sort(np.concatenate([value.ravel() for value in start.values()]))
    for before, later, weights in vectors:
        assert_same(np.sort(weights), sorted_start, "trainable")
        assert len(before) >= len(weights), "trainable and statistics are fewer than trainable"
        assert_same(later[: len(weights)], 2 * before[: len(weights)], "trainable, written")
        assert_same(later[len(weights) :], before[len(weights) :], "statistics, not written")
    for name, value in after.items():
        assert_same(value, 2 * start[name], name)
    _check_ranges(context)


_RANGES = ((0, 0), (0, 1), (1, 7), (5, None), (0, None))
"""Ranges of the trainable weights' elements: none, parts of weights, and several; None is the last one."""


def _move_range(replica: Replica, *, static: tuple[int, int | None]) -> list[Tensor]:
    """Computation that moves a range by 1; returns vectors of all before, of the range, and of all after."""
    before = replica.read(("trainable",))
    start, stop = static[0], before.shape[0] if static[1] is None else static[1]
    part = replica.read_range(start, stop)
    replica.write_range(start, part + 1)
    return [before, part, replica.read(("trainable",))]


def _check_ranges(context: CheckContext) -> None:
    """Compares what `_move_range` reads and writes with ranges of all weights' elements."""
    for start, stop in _RANGES:
        results = context.group.compute(_move_range, static=(start, stop))
        for before, part, after in [map(context.group.numpy, result) for result in results]:
            assert_same(part, before[start:stop], f"range {start} to {stop}, read")
            expected = before.copy()
            expected[start:stop] += 1
            assert_same(after, expected, f"range {start} to {stop}, written")


def _collectives(replica: Replica, tensor: Tensor) -> list[Tensor]:
    """Computation that all-reduces by every operation and all-gathers a tensor of any shape."""
    return [
        replica.all_reduce(tensor),
        replica.all_reduce(tensor * replica.replicas, "mean"),
        replica.all_reduce(tensor, "max"),
        replica.all_gather(tensor),
    ]


def computation_collectives(context: CheckContext) -> None:
    """Sums, means, maxima and gathers within a computation are those over all replicas."""
    results = [[context.group.numpy(t) for t in r] for r in _computed(context, _collectives)]
    inputs = _inputs(context)
    expected = (inputs.sum(axis=0), inputs.sum(axis=0), inputs.max(axis=0), inputs)
    for of_replica in results:
        for what, result, expected_result in zip(
            ("sum", "mean", "max", "gather"), of_replica, expected, strict=True
        ):
            assert_same(result, expected_result, what)


def _scatter(replica: Replica, tensor: Tensor) -> Tensor:
    """Computation that adds a flattened tensor at this replica's index of a vector `[replicas + 1]`."""
    ops = replica.ops
    indices = ops.cast(ops.reshape(tensor, (-1, 1)) * 0, "int32") + replica.index
    return ops.scatter(indices, ops.reshape(tensor, (-1,)), (replica.replicas + 1,))


def computation_scatters(context: CheckContext) -> None:
    """Values that are scattered to one index are added up; all other elements are zero."""
    width = context.group.replicas + 1
    _compare(context, _scatter, lambda r: np.eye(width)[r] * input_of(r).sum())


def _sum_and_broadcast(replica: Replica, tensor: Tensor, *, static: Any) -> Tensor:
    """Computation: all-reduce, then broadcast, within the subgroups `static`; any shape."""
    total = replica.all_reduce_within(tensor, static)
    return replica.broadcast_within(total + replica.index, static)


def computation_in_subgroups(context: CheckContext) -> None:
    """Sums and broadcasts stay within sets of replicas; one that is in no set keeps its tensor."""
    n = context.group.replicas
    divisions = (((0, 1),), (tuple(range(n)),), ((0,), tuple(range(1, n))))
    by_division = [_computed(context, _sum_and_broadcast, subgroups) for subgroups in divisions]
    for subgroups, results in zip(divisions, by_division, strict=True):
        _assert_equal(context, results, partial(_expected_sum, subgroups))


def _expected_sum(subgroups: Subgroups, replica: int) -> np.ndarray:
    """Expected result of `_sum_and_broadcast` on a replica, float64, shape `SHAPE`."""
    subgroup = local_subgroup(replica, subgroups) or (replica,)
    total: np.ndarray = np.sum([input_of(r) for r in subgroup], axis=0) + subgroup[0]
    return total


def _short_sum(replica: Replica, tensor: Tensor) -> Tensor:
    """Computation that all-reduces a third of a tensor in bfloat16; returns float64 of its shape."""
    third = replica.ops.cast(tensor / 3, "bfloat16")
    return replica.ops.cast(replica.all_reduce(third), "float64")


def computation_in_bfloat16(context: CheckContext) -> None:
    """A sum of bfloat16 tensors is right to the precision of that type."""
    results = [context.group.numpy(tensor) for tensor in _computed(context, _short_sum)]
    expected = _inputs(context).sum(axis=0) / 3
    for result in results:
        error = np.abs(result - expected).max() / np.abs(_inputs(context)).max()
        assert CLOSE < error < 2.0**-6, f"relative difference {error:.3g}"
