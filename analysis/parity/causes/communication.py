"""Causes in the reduction of the replicas' gradients."""

from __future__ import annotations

import numpy as np

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.case import FITS, DivergenceCase, stacked
from isotrain.analysis.parity.causes.clipping import clipped
from isotrain.analysis.parity.records import STAGES, Cause
from isotrain.analysis.parity.run_trace import Tensors

_COARSEST = 2.0**-6
"""Relative error of a sum that is rounded to bfloat16 a few times."""


def wrong_reduction(case: DivergenceCase) -> Cause | None:
    """The most specific explanation of wrongly reduced gradients."""
    for suspect in (clipped_before_reduction, wrong_weights_of_replicas, duplicated_padding):
        cause = suspect(case)
        if cause is not None:
            return cause
    return None


def clipped_before_reduction(case: DivergenceCase) -> Cause | None:
    """Gradients that each replica clipped before the reduction."""
    clip = case.spec.clip
    replicas = case.run_step.copies["gradient"]
    if clip is None or case.first.stage not in ("reduced", "weight") or len(replicas) < 2:
        return None
    predicted = tensor_sketch.means([clipped(gradients, clip) for gradients in replicas])
    actual = case.run_step.update
    left = _misfit(actual, predicted)
    right = _misfit(actual, tensor_sketch.means(replicas))
    if left > max(FITS, 0.1 * right):
        return None
    kind = next(
        name for name in ("value", "norm", "global_norm") if getattr(clip, name) is not None
    )
    return Cause(
        "clipping-before-reduction",
        "gradients are clipped on each replica before they are reduced",
        [
            "gradients before the reduction agree",
            f"clipping each replica's gradients ({kind}: {getattr(clip, kind):g}) and then taking the mean"
            f" gives the reduced gradients up to {left:.1g}",
            f"the mean of the gradients as they are is {right:.2g} away from them",
        ],
        "reduce first, then clip; an optimizer that clips must be given gradients that are reduced.",
    )


def _misfit(actual: Tensors, predicted: Tensors) -> float:
    """The norm of the difference between tensors and their prediction, relative to the tensors' norm.

    Predictions without a sketch are compared at the sampled elements.
    """
    left: list[float] = []
    whole: list[float] = []
    for name, tensor in actual.items():
        other = predicted[name]
        one, two = tensor.sketch, other.sketch
        if not two:
            one, two = tensor.sample, other.sample
        left += [a - b for a, b in zip(one, two, strict=True)]
        whole += one
    scale = tensor_sketch.length(whole)
    return tensor_sketch.length(left) / scale if scale else 0.0


def wrong_weights_of_replicas(case: DivergenceCase) -> Cause | None:
    """Reduced gradients that sum the replicas' gradients with wrong weights (least squares)."""
    replicas = case.run_step.copies["gradient"]
    if case.first.stage != "reduced":
        return None
    columns = [stacked(gradients) for gradients in replicas]
    target = stacked(case.run_step.update)
    factors, *_ = np.linalg.lstsq(np.stack(columns, axis=1), target, rcond=None)
    left = np.linalg.norm(target - np.stack(columns, axis=1) @ factors) / np.linalg.norm(target)
    mean = np.mean(columns, axis=0)
    ratio = float(target @ mean / (mean @ mean))
    along = float(np.linalg.norm(target - ratio * mean) / np.linalg.norm(target))
    if along < _COARSEST and abs(ratio - 1) < along:
        return _rounded(along)
    if along < FITS:
        return _scaled(case, ratio, along, len(replicas))
    return None if left > FITS else _of_some(case, [float(f) for f in factors], float(left))


def _rounded(left: float) -> Cause:
    return Cause(
        "reduced-in-fewer-bits",
        "gradients are rounded when they are reduced",
        [
            "gradients before the reduction agree",
            f"the reduced gradients are the mean over the replicas, rounded by {left:.1g} of their norm"
            f" (float32 rounds by {2.0**-24:.1g}, float16 by {2.0**-11:.1g}, bfloat16 by {2.0**-8:.1g})",
        ],
        "look for compression of gradients, or for another type in the reduction.",
    )


def _scaled(case: DivergenceCase, ratio: float, left: float, replicas: int) -> Cause:
    evidence = [
        "gradients before the reduction agree",
        f"the reduced gradients are {ratio:.6g} times the mean over the {replicas} replicas, in all"
        f" tensors alike (what is left: {left:.1g})",
    ]
    if abs(ratio - replicas) < FITS * replicas:
        return Cause(
            "sum-instead-of-mean",
            "gradients are summed over the replicas, not averaged",
            evidence,
            f"divide by the {replicas} replicas, once: in the loss or in the reduction.",
        )
    if abs(ratio * replicas - 1) < FITS:
        return Cause(
            "divided-twice",
            "gradients are divided by the number of replicas twice",
            evidence,
            "divide once: in the loss or in the reduction.",
        )
    return Cause(
        "gradients-scaled",
        f"gradients are multiplied by {ratio:.4g}",
        evidence,
        "look for a factor in the loss or in the reduction.",
    )


def _of_some(case: DivergenceCase, factors: list[float], left: float) -> Cause:
    shown = ", ".join(f"{factor:.3g}" for factor in factors)
    evidence = [
        "gradients before the reduction agree",
        f"the reduced gradients are the replicas' own times {shown} (what is left: {left:.1g}); the mean"
        f" takes each times {1 / len(factors):.3g}",
        f"the replicas have {', '.join(map(str, case.run_step.local_batch_sizes))} samples",
    ]
    if not case.run_step.even:
        return _padding(evidence)
    if len([f for f in factors if abs(f) < FITS]) == len(factors) - 1:
        return Cause(
            "not-reduced",
            "gradients are not exchanged: the first replica uses its own",
            evidence,
            "see that the reduction covers every weight.",
        )
    return Cause(
        "replicas-weighted",
        "replicas do not count equally",
        evidence,
        "every replica's gradient counts by its share of the samples.",
    )


def _padding(evidence: list[str]) -> Cause:
    return Cause(
        "duplicated-padding",
        "samples are counted twice where the global batch does not divide by the replicas",
        evidence,
        "weigh each replica by the samples that it really has; do not repeat samples to fill up a batch.",
    )


def duplicated_padding(case: DivergenceCase) -> Cause | None:
    """Padded partial batches: even steps agree, and the first uneven step diverges."""
    if not case.are_gradients or case.run_step.even or len(case.run_step.local_batch_sizes) < 2:
        return None
    before = [step for step in case.run.steps[: case.index] if step.even]
    if not before:
        return None
    most, least = max(case.run_step.local_batch_sizes), min(case.run_step.local_batch_sizes)
    return _padding(
        [
            f"all {len(before)} steps before, whose samples divide by {len(case.run_step.local_batch_sizes)}"
            " replicas, agree",
            f"step {case.first.step} has {case.run_step.samples} samples, the first number that does not:"
            f" replicas have from {least} to {most}",
            f"{STAGES[case.first.stage]} differs by {case.first.difference:.2g}; one sample in"
            f" {case.run_step.samples} is {1 / case.run_step.samples:.2g}",
        ]
    )
