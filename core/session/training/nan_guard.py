"""What becomes of a run whose loss is NaN: not a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isnan
from typing import Any, Literal

import numpy as np

from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data.batch import Batch
from isotrain.core.data.pytree import leaves
from isotrain.core.errors import NotANumberError

OnNan = Literal["stop", "warn", "ignore"]
LoadSamples = Callable[[int], Batch | None]
"""Gives the slices of every replica in a step, as NumPy arrays; None where they cannot be read again."""

_USUAL = (
    "Usual reasons: a learning rate that is too high (lower it, clip, or warm up), log(0), and a"
    " division by 0."
)


class NanGuard:
    """Looks at losses that were read anyway, and looks for the cause at the first that is NaN."""

    def __init__(
        self, action: OnNan, reporter: Reporter, explain_nan: Callable[[int], str]
    ) -> None:
        """Waits for losses.

        Args:
            action: What to do at the first.
            reporter: Tells the launcher.
            explain_nan: Says in words what is to blame for the loss of a step.
        """
        self._waits = action != "ignore"
        self._stops = action == "stop"
        self._reporter = reporter
        self._culprit = explain_nan

    def check(self, first: int, losses: Sequence[float]) -> None:
        """Takes the losses of steps that follow each other.

        Raises:
            NotANumberError: One is NaN, and the spec says `stop`.
        """
        if not self._waits:
            return
        step = next((first + i for i, loss in enumerate(losses) if isnan(loss)), None)
        if step is None:
            return
        self._waits = False
        text = f"the loss of step {step} is NaN (not a number). {self._culprit(step)}"
        if self._stops:
            raise NotANumberError(
                f"{text} `on_nan: warn` in the spec lets the run go on, `ignore` without a word."
            )
        self._reporter.warn(f"{text} The run goes on (on_nan: warn).")


def explain_nan(step: int, samples: LoadSamples, plan: Plan, group: ReplicaGroup) -> str:
    """Says which samples or weights are NaN, as far as rank 0 can see.

    Args:
        step: Whose loss is NaN.
        samples: The data, which are a function of the step.
        plan: Tells in which rank a replica lives.
        group: Has the weights, as later steps have left them.
    """
    batch = samples(step)
    found = [] if batch is None else list(_broken_samples(batch))
    if found:
        name, replica = found[0]
        return (
            f"NaN or infinity is in the data: {name} in the slice of replica {replica} (rank"
            f" {_rank_of(replica, plan)})."
        )
    weights = group.read_state(("trainable",))
    broken = [name for name, value in weights.items() if not np.isfinite(value).all()]
    clean = "" if batch is None else "The samples of that step are all finite. "
    if not broken:
        return f"{clean}The weights are finite too. {_USUAL}"
    return f"{clean}{len(broken)} of {len(weights)} weights are not, {broken[0]!r} first. {_USUAL}"


def _broken_samples(batch: Batch) -> Iterator[tuple[str, int]]:
    for replica, pieces in enumerate(batch.slices):
        for piece in pieces:
            found = [*leaves(piece.inputs, "inputs"), *leaves(piece.targets, "targets")]
            for name, array in found:
                if piece.count and _is_broken(array):
                    yield name, replica


def _is_broken(array: Any) -> bool:
    return array is not None and array.dtype.kind in "fc" and not np.isfinite(array).all()


def _rank_of(replica: int, plan: Plan) -> int:
    """The rank that computes a replica: a coordinator holds them all, and computes none."""
    holders = [each.rank for each in plan.processes if replica in each.replicas]
    return holders[-1]
