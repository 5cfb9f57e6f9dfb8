"""Causes in the optimizer: equal gradients, unequal updates."""

from __future__ import annotations

import numpy as np

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.case import FITS, DivergenceCase, stacked
from isotrain.analysis.parity.causes.optimizer_forms import epsilon_form
from isotrain.analysis.parity.records import Cause
from isotrain.analysis.parity.run_trace import RunTrace, Tensors


def epsilon(case: DivergenceCase) -> Cause | None:
    """Equal gradients whose updates differ by where the optimizer adds its epsilon."""
    if case.first.stage not in ("weight", "optimizer"):
        return None
    ours, theirs = (epsilon_form(case.spec, run, case.index) for run in (case.run, case.reference))
    if ours is None or theirs is None or ours.formula == theirs.formula:
        return None
    return Cause(
        "epsilon-elsewhere",
        "the optimizer adds its epsilon in another place",
        [
            "gradients before and after the reduction agree",
            f"this run's updates are those of {ours.formula} (off by {ours.error:.1g};"
            f" the reference's formula: {ours.errors[theirs.formula]:.1g})",
            f"the reference's are those of {theirs.formula} (off by {theirs.error:.1g};"
            f" this run's formula: {theirs.errors[ours.formula]:.1g})",
        ],
        "use the same form of the optimizer, or an epsilon so small that it does not matter for these"
        " gradients.",
    )


def scaled_update(case: DivergenceCase) -> Cause | None:
    """Equal gradients whose updates differ by a constant factor."""
    if case.first.stage != "weight":
        return None
    update, expected = (stacked(_moved(run, case.index)) for run in (case.run, case.reference))
    if not np.any(update) or not np.any(expected):
        return None
    ratio = float(update @ expected / (expected @ expected))
    residual = float(np.linalg.norm(update - ratio * expected) / np.linalg.norm(update))
    if residual > 10 * FITS or abs(ratio - 1) < 2 * residual:
        return None
    return Cause(
        "learning-rate",
        f"the learning rate is {ratio:.4g} times the reference's",
        [
            "gradients before and after the reduction agree",
            f"every weight moves {ratio:.4g} times as far (what is left: {residual:.1g})",
        ],
        "compare how the rate, its scaling and its schedule reach the optimizer.",
    )


def _moved(run: RunTrace, index: int) -> Tensors:
    """The update of every weight in a step, as fingerprints."""
    after, before = run.steps[index].tensors["weight"], run.before(index, "weight")
    return {n: tensor_sketch.combination([1.0, -1.0], [after[n], before[n]]) for n in sorted(after)}
