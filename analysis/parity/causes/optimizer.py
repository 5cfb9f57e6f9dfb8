"""Causes in what the optimizer makes of equal gradients."""

from __future__ import annotations

import numpy as np

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.case import FITS, DivergenceCase, stacked
from isotrain.analysis.parity.causes.optimizer_forms import epsilon_form
from isotrain.analysis.parity.records import Cause
from isotrain.analysis.parity.run_trace import RunTrace, Tensors


def epsilon(case: DivergenceCase) -> Cause | None:
    """Gradients agree, updates do not, and the epsilon in another place explains it."""
    if case.first.stage not in ("weight", "slot"):
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
    """Gradients agree, and every weight moves by a constant times what it should."""
    if case.first.stage != "weight":
        return None
    moved, wanted = (stacked(_moved(run, case.index)) for run in (case.run, case.reference))
    if not np.any(moved) or not np.any(wanted):
        return None
    ratio = float(moved @ wanted / (wanted @ wanted))
    left = float(np.linalg.norm(moved - ratio * wanted) / np.linalg.norm(moved))
    if left > 10 * FITS or abs(ratio - 1) < 2 * left:
        return None
    return Cause(
        "learning-rate",
        f"the learning rate is {ratio:.4g} times the reference's",
        [
            "gradients before and after the reduction agree",
            f"every weight moves {ratio:.4g} times as far (what is left: {left:.1g})",
        ],
        "compare how the rate, its scaling and its schedule reach the optimizer.",
    )


def _moved(run: RunTrace, index: int) -> Tensors:
    """What a step adds to the weights."""
    after, before = run.steps[index].tensors["weight"], run.before(index, "weight")
    return {n: tensor_sketch.combination([1.0, -1.0], [after[n], before[n]]) for n in sorted(after)}
