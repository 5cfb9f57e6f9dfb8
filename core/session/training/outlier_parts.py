"""Parts of a global batch that are left out for their gradients (`drop_outliers` of the spec)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from isotrain.core.contracts.backend.computations import squared_norm
from isotrain.core.contracts.backend.replica import Replica, Tensor
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.process import ProcessInfo, named_replicas
from isotrain.core.data.batch import Batch
from isotrain.core.data.sampler import part_bounds, slice_bounds

_NOT_FINITE = 1e300
"""Norm of a part whose loss or squared norm is not finite: a maximum over processes keeps it."""

Rows = Sequence[Sequence[Sequence[Tensor]]]
"""For each part in turn, for each local replica, its tensors: gradients, loss, and others."""


class OutlierParts:
    """Leaves out parts whose gradient norm is far beyond the median of all parts, or not finite.

    With a median of 0, only those that are not finite.

    The means are then over the samples of the other parts. All processes decide by the same norms, one for
    each part of the global batch, so that the outcome does not depend on who has computed a part.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        times: float,
        processes: Sequence[ProcessInfo],
        warn: Callable[[str], None] | None,
    ) -> None:
        """Takes what to compare with.

        Args:
            group: Replica group of this process.
            times: Largest norm of a part, in medians of the norms of all parts.
            processes: Processes of the run, for warnings.
            warn: Sends a warning; None for none.
        """
        self._group = group
        self._times = times
        self._processes = processes
        self._warn = warn
        self._weights = len(group.describe_state(("trainable",)))

    def drop(self, batch: Batch, rows: Rows) -> tuple[Rows, float]:
        """Replaces the tensors of outliers by zeros. Collective.

        Where half of the samples or more would be left out, none are.

        Args:
            batch: Global batch, with the number of parts of each replica.
            rows: Tensors of each part.

        Returns:
            The rows, and the factor by which sums over all parts are to be multiplied: 1 without outliers.
        """
        assert batch.part_counts is not None
        parts = sum(batch.part_counts)
        bounds = [slice_bounds(batch.size, parts, part) for part in range(parts)]
        sizes = [stop - start for start, stop in bounds]
        norms = self._norms(batch, rows)
        means = [
            norm if norm == _NOT_FINITE else norm * batch.size / size
            for norm, size in zip(norms, sizes, strict=True)
            if size
        ]
        filled = [part for part in range(parts) if sizes[part]]
        finite = [mean for mean in means if mean < _NOT_FINITE]
        median = statistics.median(finite) if finite else 0.0
        most = self._times * median or math.inf
        dropped = {
            part: mean
            for part, mean in zip(filled, means, strict=True)
            if mean == _NOT_FINITE or mean > most
        }
        kept = batch.size - sum(sizes[part] for part in dropped)
        if not dropped or 2 * kept <= batch.size:
            return rows, 1.0
        if self._warn is not None:
            for part, mean in dropped.items():
                self._warn(self._warning(batch, part, mean, median))
        return self._without(batch, rows, dropped), batch.size / kept

    def _norms(self, batch: Batch, rows: Rows) -> list[float]:
        """Norm of what each part adds to the gradients, the same on all processes. Collective."""
        assert batch.part_counts is not None
        norms = [0.0] * sum(batch.part_counts)
        for index, row in enumerate(rows):
            squares = self._group.compute(squared_norm, [each[: self._weights] for each in row])
            for replica, square, tensors in zip(
                self._group.local_replicas, squares, row, strict=True
            ):
                first, end = part_bounds(batch.part_counts, replica)
                if first + index < end:
                    loss = float(self._group.numpy(tensors[self._weights]).item())
                    norm = math.sqrt(self._group.numpy(square).item())
                    is_finite = math.isfinite(norm) and math.isfinite(loss)
                    norms[first + index] = norm if is_finite else _NOT_FINITE
        return self._group.all_reduce_max(norms)

    def _without(self, batch: Batch, rows: Rows, dropped: dict[int, float]) -> Rows:
        """The rows, with zeros in place of the tensors of some parts. Local."""
        assert batch.part_counts is not None
        firsts = [part_bounds(batch.part_counts, each)[0] for each in self._group.local_replicas]
        kept: list[list[Sequence[Tensor]]] = []
        for index, row in enumerate(rows):
            zeros = self._group.compute(_zeros, row)
            kept.append(
                [
                    zeros[position] if first + index in dropped else row[position]
                    for position, first in enumerate(firsts)
                ]
            )
        return kept

    def scaled(self, totals: Sequence[Sequence[Tensor]], factor: float) -> list[list[Tensor]]:
        """Sums over all parts times a factor, for each local replica. Local."""
        if factor == 1.0:
            return [list(sums) for sums in totals]
        factors = [self._group.tensor(np.array(factor)) for _ in totals]
        return self._group.compute(_times, totals, factors)

    def _warning(self, batch: Batch, part: int, mean: float, median: float) -> str:
        """Text on one part that is left out."""
        assert batch.part_counts is not None
        counts = batch.part_counts
        replica = next(each for each in range(len(counts)) if part < part_bounds(counts, each)[1])
        owner = named_replicas(self._processes, [replica])
        what = (
            "its loss or gradients are not finite, or too large"
            if mean == _NOT_FINITE
            else f"its gradient norm is {mean:.3g}, and the median of all parts {median:.3g}"
        )
        return (
            f"step {batch.step}: part {part} of {sum(counts)} of the global batch, from {owner}, is left out"
            f" (drop_outliers): {what}."
        )


def _zeros(replica: Replica, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Zeros in place of tensors of any shapes. Local."""
    return [replica.ops.zeros_like(tensor) for tensor in tensors]


def _times(replica: Replica, tensors: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Tensors of any shapes times a scalar, in their dtypes. Local."""
    return [tensor * replica.ops.cast(factor, tensor.dtype) for tensor in tensors]
