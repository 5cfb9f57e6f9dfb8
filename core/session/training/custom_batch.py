"""Global batches of arrays that the processes of a training loop have for themselves."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import numpy as np

from isotrain.core.data.arrays import (
    InputsAndTargets,
    as_arrays,
    as_inputs_and_targets,
    require_equal_rows,
)
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.loader import slice_rows
from isotrain.core.data.pytree import map_parts, part_leaves
from isotrain.core.data.sampler import slice_bounds
from isotrain.core.errors import DataError, UnsupportedError
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.trainer_state import TrainerState

_SHOWN = 400
"""Number of bytes of the shapes of a replica that an error shows."""


class BatchBuilder:
    """Makes global batches of arrays of all processes, whose numbers of rows may differ. Collective."""

    def __init__(self, session_context: SessionContext, trainer_state: TrainerState) -> None:
        self._group = session_context.group
        self._to_device = session_context.loaders.to_device
        self._accumulation = session_context.spec.gradient_accumulation_steps
        self._spec = session_context.spec
        self._shares_replicas = session_context.plan.device_mesh.positions_per_replica > 1
        self._trainer_state = trainer_state

    def build(self, inputs: Any, targets: Any, sample_weights: Any) -> Batch:
        """The batch of the next step, as `Session.batch`.

        Raises:
            DataError: Arrays are not of equally many rows, no process has a row, or they differ in parts.
            UnsupportedError: Several processes share a replica.
        """
        if self._shares_replicas:
            raise UnsupportedError(
                "session.batch: in pipeline and tensor-parallel runs several processes share a replica, and"
                " arrays of one process have no replica. Give the spec `data`, or take another strategy."
            )
        if self._spec.dealt_parts is not None:
            field = "reproducible" if self._spec.reproducible else "batch_norm: ghost"
            raise UnsupportedError(
                f"session.batch: with {field}, every process must know the parts of the global batch, and"
                f" here each has rows of its own. Give the spec `data`, or leave {field} out."
            )
        parts = _as_parts(inputs, targets, sample_weights)
        rows = require_equal_rows(parts)
        count = len(self._group.local_replicas)
        bounds = [slice_bounds(rows, count, index) for index in range(count)]
        counts, varies = self._exchanged([stop - start for start, stop in bounds], parts)
        if not any(counts):
            raise DataError("session.batch: no process has a row; expected at least one of all.")
        if not all(counts) and not self._group.is_single_process:
            first = next(replica for replica, count in enumerate(counts) if count)
            row = self._first_row_of(first, parts)
            parts = parts if rows else row
        size = sum(counts)
        before = sum(counts[: self._group.local_replicas[0]])
        slices = tuple(self._slices(parts, *each, size, before) for each in bounds)
        state = self._trainer_state
        epoch, index = divmod(state.steps_done, state.steps_per_epoch)
        return Batch(
            epoch,
            index,
            state.steps_done,
            size,
            is_last_of_epoch=index == state.steps_per_epoch - 1,
            even=len(set(counts)) == 1,
            slices=slices,
            stream_state=state.stream_state,
            varying_widths=varies,
        )

    def _exchanged(
        self, local_counts: list[int], parts: InputsAndTargets
    ) -> tuple[list[int], bool]:
        """Number of rows of every replica of the run, and whether shapes of rows differ. Collective.

        Raises:
            DataError: Processes have other parts or axes; or one without rows has other shapes.
        """
        group = self._group
        if group.is_single_process:
            return local_counts, False
        arrays = [*part_leaves(parts)]
        axes = str([(name, array.ndim) for name, array in arrays])
        shapes = ", ".join(
            f"{name} [{', '.join(['rows', *map(str, array.shape[1:])])}]" for name, array in arrays
        )
        checksums = [zlib.crc32(text.encode()) for text in (axes, shapes)]
        numbers = np.zeros((group.replicas, 3))
        numbers[list(group.local_replicas)] = [[count, *checksums] for count in local_counts]
        maxima = np.reshape(group.all_reduce_max(numbers.ravel().tolist()), numbers.shape)
        counts = [int(count) for count in maxima[:, 0]]
        same_axes, same_shapes = (len({*column}) == 1 for column in maxima.T[1:])
        if not same_axes or not (same_shapes or all(counts)):
            expected = (
                "arrays without rows to be as wide as those of the other replicas"
                if same_axes
                else "arrays of the same names and numbers of axes on all replicas"
            )
            received = self._shapes_of_all(shapes)
            raise DataError(f"session.batch: expected {expected}, received {received}.")
        return counts, not same_shapes

    def _shapes_of_all(self, shapes: str) -> str:
        """The shapes that processes have, each with the replicas that have it. Collective."""
        group = self._group
        codes = np.zeros((group.replicas, _SHOWN))
        local = [*shapes.encode()[:_SHOWN]]
        codes[list(group.local_replicas), : len(local)] = local
        replicas: dict[str, list[str]] = {}
        for replica, row in enumerate(
            np.reshape(group.all_reduce_max(codes.ravel().tolist()), codes.shape)
        ):
            text = bytes(int(code) for code in row if code).decode(errors="replace")
            replicas.setdefault(text, []).append(str(replica))
        return "; ".join(f"{text} of replica {', '.join(each)}" for text, each in replicas.items())

    def _first_row_of(self, replica: int, parts: InputsAndTargets) -> InputsAndTargets:
        """The first row of the process that holds a replica: arrays `[1, ...]` like the parts. Collective."""
        arrays = [array for _, array in part_leaves(parts)]
        if replica in self._group.local_replicas:
            values = [float(number) for array in arrays for number in array[0].flat]
        else:
            values = [-np.inf] * sum(math.prod(array.shape[1:]) for array in arrays)
        row = iter(self._group.all_reduce_max(values))

        def as_row(array: np.ndarray) -> np.ndarray:
            shape = 1, *array.shape[1:]
            numbers = list(itertools.islice(row, math.prod(shape)))
            return np.array(numbers).astype(array.dtype).reshape(shape)

        return map_parts(as_row, parts)

    def _slices(
        self, parts: InputsAndTargets, start: int, stop: int, size: int, before: int
    ) -> tuple[Slice, ...]:
        """The micro-batches of a replica: rows `start` to `stop` of arrays `[rows, ...]`, on the device.

        Micro-batches without rows get the replica's first row, or any row of the arrays, as a placeholder.
        `before` is the number of samples of the processes before this one.
        """
        first_row = start if start < stop else 0
        slices = []
        for index in range(self._accumulation):
            begin, end = slice_bounds(stop - start, self._accumulation, index)
            rows = (
                slice(start + begin, start + end)
                if begin < end
                else slice(first_row, first_row + 1)
            )
            tensors = map_parts(self._to_device, slice_rows(parts, rows))
            weight = (end - begin) * self._group.replicas / size
            slices.append(Slice(*tensors, end - begin, weight, before + rows.start))
        return tuple(slices)


def _as_parts(inputs: Any, targets: Any, sample_weights: Any) -> InputsAndTargets:
    """Copies of the arrays, `[rows, ...]`: the caller may write to its own before the step."""
    given = [inputs, targets, sample_weights]
    while given[-1] is None and len(given) > 1:
        given.pop()
    inputs, targets = as_inputs_and_targets(tuple(given), "session.batch")
    arrays = (
        as_arrays(inputs, "inputs"),
        None if targets is None else as_arrays(targets, "targets"),
    )
    return map_parts(np.array, arrays)
