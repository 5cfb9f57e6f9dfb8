"""Detection of a NaN loss: stops the run or warns, with the likely cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite, isnan
from typing import Literal

import numpy as np

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data.batch import Batch
from isotrain.core.data.pytree import part_leaves
from isotrain.core.errors import NotANumberError

OnNan = Literal["stop", "warn", "ignore", "skip"]
LoadSamples = Callable[[int], Batch | None]
"""Returns the batch of a step, for all replicas, as NumPy arrays; None where it cannot be read again."""

_COMMON_CAUSES = (
    "a learning rate that is too high (lower it, clip, or warm up)",
    "log(0)",
    "a division by 0",
)


class NanGuard:
    """Checks losses that were read from the device anyway; explains the first one that is NaN."""

    def __init__(
        self, action: OnNan, reporter: Reporter, explain_nan: Callable[[int], str]
    ) -> None:
        """Sets what to do at the first NaN, by `on_nan` of the spec; `explain_nan` says its likely cause."""
        self._is_active = action in ("stop", "warn")
        self._stops = action == "stop"
        self._skips = action == "skip"
        self._reporter = reporter
        self._explain_nan = explain_nan

    def counts(self, loss: float) -> bool:
        """Whether the loss of a step is part of the mean of its epoch: that of a skipped step is not."""
        return isfinite(loss) or not self._skips

    def check(self, first: int, losses: Sequence[float]) -> None:
        """Checks the losses of consecutive steps, the first of which has the index `first`.

        Raises:
            NotANumberError: A loss is NaN, and the spec says `on_nan: stop`.
        """
        if not self._is_active:
            return
        step = next((first + i for i, loss in enumerate(losses) if isnan(loss)), None)
        if step is None:
            return
        self._is_active = False
        text = f"the loss of step {step} is NaN (not a number). {self._explain_nan(step)}"
        if self._stops:
            raise NotANumberError(
                f"{text} `on_nan: warn` in the spec lets the run go on, `ignore` without a word."
            )
        self._reporter.warn(f"{text} The run goes on (on_nan: warn).")


def explain_nan(
    step: int, samples: LoadSamples, plan: Plan, group: ReplicaGroup, compiles: bool
) -> str:
    """Says which samples or weights are NaN or infinite, as far as rank 0 can see. Local.

    Args:
        step: Index of the step whose loss is NaN.
        samples: Returns the batch of a step.
        plan: The plan, which maps replicas to ranks.
        group: The replica group, whose weights later steps may have changed.
        compiles: Whether steps are compiled, which may leave out the checks of targets that are classes.
    """
    batch = samples(step)
    non_finite = [] if batch is None else list(_non_finite_samples(batch))
    if non_finite:
        name, replica = non_finite[0]
        return (
            f"NaN or infinity is in the data: {name} in the slice of replica {replica} (rank"
            f" {_rank_of(replica, plan)})."
        )
    weights = group.read_state(("trainable",))
    broken = [name for name, value in weights.items() if not np.isfinite(value).all()]
    clean = "" if batch is None else "The samples of that step are all finite. "
    *causes, last = [*_COMMON_CAUSES, *_unchecked_classes(batch if compiles else None)]
    usual = f"Usual reasons: {', '.join(causes)}, and {last}."
    if not broken:
        return f"{clean}The weights are finite too. {usual}"
    return f"{clean}{len(broken)} of {len(weights)} weights are not, {broken[0]!r} first. {usual}"


def _unchecked_classes(batch: Batch | None) -> list[str]:
    """The cause that compiled steps do not check, with the range of a batch's integer targets."""
    targets = [
        array
        for slices in ([] if batch is None else batch.slices)
        for micro_batch in slices
        for _, array in part_leaves((None, micro_batch.targets))
        if micro_batch.count and array is not None and array.dtype.kind in "iu" and array.size
    ]
    if not targets:
        return []
    low, high = min(each.min() for each in targets), max(each.max() for each in targets)
    return [
        "a target that is no class of the predictions, which compiled steps may not check (the targets"
        f" of that step are {low} to {high})"
    ]


def _non_finite_samples(batch: Batch) -> Iterator[tuple[str, int]]:
    """Names of inputs or targets with a NaN or infinity, each with its replica."""
    for replica, micro_batches in enumerate(batch.slices):
        for micro_batch in micro_batches:
            for name, array in part_leaves((micro_batch.inputs, micro_batch.targets)):
                is_floating = array is not None and array.dtype.kind in "fc"
                if micro_batch.count and is_floating and not np.isfinite(array).all():
                    yield name, replica


def _rank_of(replica: int, plan: Plan) -> int:
    """The rank that computes a replica: a coordinator (listed first) holds all replicas, computes none."""
    holders = [each.rank for each in plan.processes if replica in each.replicas]
    return holders[-1]
