"""Decides whether rounding explains the differences between two traced runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from isotrain.analysis.parity.case import DivergenceCase
from isotrain.analysis.parity.causes.causes import likely_causes
from isotrain.analysis.parity.noise_floor import NoiseFloor
from isotrain.analysis.parity.records import STAGES, Cause, Divergence, RunStatus, Stage, StepRecord
from isotrain.analysis.parity.run_trace import RunTrace, StepTrace, differences
from isotrain.core.spec.training_spec import TrainingSpec

SHRUNK = 2.0**-10
"""A difference that shrinks below this fraction in float64 is rounding. Rounding alone shrinks by 2^-29 in
the first steps; chaotic growth undoes some of that later."""

RerunInFloat64 = Callable[[], tuple[RunTrace, RunTrace, NoiseFloor] | None]
"""Reruns in float64: the run, the reference and their noise floor; None if a rerun failed."""


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on one run; `RunRecord` explains the fields."""

    status: RunStatus
    reason: str
    first: Divergence | None
    divergences: list[Divergence]
    causes: list[Cause]
    confirmed: float | None


def judge(
    spec: TrainingSpec,
    run: RunTrace,
    reference: RunTrace,
    floor: NoiseFloor,
    other_precision: RunTrace | None,
    in_float64: RerunInFloat64,
) -> RunVerdict:
    """Compares a run with the reference.

    Args:
        spec: Training spec of the run.
        run: Trace of the run.
        reference: Trace of the reference, of the same steps.
        floor: Noise floor of the reference.
        other_precision: Trace of the reference in another precision; None if that run failed.
        in_float64: Reruns both in float64; called if the run diverges in a lower precision.
    """
    divergences = find_divergences(run, reference, floor)
    if not divergences:
        return RunVerdict(*_agreement(run, reference, floor), None, [], [], None)
    confirmed = None
    rerun = in_float64() if reference.precision != "float64" else None
    if rerun is not None:
        confirmed_divergences = _clearer(divergences[0], *rerun)
        confirmed = _difference_at(divergences[0], rerun[0], rerun[1])
        if not confirmed_divergences:
            return RunVerdict(
                "rounding", _shrunk(divergences[0], confirmed), None, [], [], confirmed
            )
        run, reference, floor = rerun
        other_precision = None
        divergences = confirmed_divergences
        confirmed = divergences[0].difference
    first = divergences[0]
    simultaneous = [p for p in divergences if (p.step, p.stage) == (first.step, first.stage)]
    simultaneous.sort(key=lambda p: p.difference / p.floor if p.floor else math.inf, reverse=True)
    case = DivergenceCase(spec, run, reference, floor, simultaneous, other_precision)
    reason = (
        f"{STAGES[first.stage]} {first.name!r} differs in step {first.step}: relative difference"
        f" {first.difference:.2g}, noise floor {first.floor:.2g}"
    )
    if first.precision != reference.plan["precision"] or confirmed is not None:
        reason += ", in float64, where rounding would be far smaller"
    return RunVerdict(
        "difference", f"{reason}.", first, simultaneous, likely_causes(case), confirmed
    )


def find_divergences(run: RunTrace, reference: RunTrace, floor: NoiseFloor) -> list[Divergence]:
    """All tensors of all steps that exceed the noise floor, in the order of steps and stages."""
    divergences = []
    for index, (step, other) in enumerate(zip(run.steps, reference.steps, strict=True)):
        for (stage, name), value in differences(step, other).items():
            bound = bound_of(floor, index, step, stage, name)
            if value > bound:
                divergences.append(
                    Divergence(step.step, stage, name, value, bound, floor.precision)
                )
    return divergences


def bound_of(floor: NoiseFloor, index: int, step: StepTrace, stage: Stage, name: str) -> float:
    """The noise floor of a tensor; 0 for integer tensors."""
    tensor = step.tensors.get(stage, {}).get(name)
    return 0.0 if tensor is not None and not tensor.floating else floor.at(index, stage, name)


def _clearer(
    first: Divergence, run: RunTrace, reference: RunTrace, floor: NoiseFloor
) -> list[Divergence]:
    """Divergences that remain in float64, without small side effects; empty if all was rounding."""
    divergences = find_divergences(run, reference, floor)
    return [p for p in divergences if p.difference > SHRUNK * min(first.difference, 1.0)]


def _difference_at(first: Divergence, run: RunTrace, reference: RunTrace) -> float:
    for step, other in zip(run.steps, reference.steps, strict=True):
        if step.step == first.step:
            return differences(step, other).get((first.stage, first.name), math.nan)
    return math.nan


def _shrunk(first: Divergence, confirmed: float) -> str:
    return (
        f"{STAGES[first.stage]} {first.name!r} is {first.difference:.2g} apart in step {first.step},"
        f" beyond the reference's own noise (floor {first.floor:.2g}); in float64 only"
        f" {confirmed:.2g} is left of it, so it is rounding: this backend rounds more or otherwise."
    )


def _agreement(run: RunTrace, reference: RunTrace, floor: NoiseFloor) -> tuple[RunStatus, str]:
    largest = nearest = 0.0
    stage: Stage = "loss"
    name = "loss"
    for index, (step, other) in enumerate(zip(run.steps, reference.steps, strict=True)):
        for key, value in differences(step, other).items():
            bound = bound_of(floor, index, step, *key)
            largest = max(largest, value)
            if bound and value / bound > nearest:
                nearest, (stage, name) = value / bound, key
    if largest == 0.0:
        return "equal", "every fingerprint is equal to the last digit."
    return "rounding", (
        f"no tensor differs by more than the noise floor; the nearest to it is"
        f" {STAGES[stage]} {name!r} with {nearest:.2g} of the floor."
    )


def step_records(run: RunTrace, reference: RunTrace, floor: NoiseFloor) -> list[StepRecord]:
    """The traced steps of a run, each compared with the same step of the reference."""
    records = []
    for index, (step, other) in enumerate(zip(run.steps, reference.steps, strict=True)):
        loss_floor = floor.at(index, "loss", "loss")
        largest: dict[str, float] = {}
        excess: dict[str, float] = {}
        is_reference = run is reference
        for (stage, name), value in ({} if is_reference else differences(step, other)).items():
            bound = bound_of(floor, index, step, stage, name)
            ratio = value / bound if bound else (math.inf if value else 0.0)
            largest[stage] = max(largest.get(stage, 0.0), value)
            excess[stage] = max(excess.get(stage, 0.0), ratio)
        records.append(
            StepRecord(
                step=step.step,
                samples=step.samples,
                loss=step.loss,
                loss_difference=None if is_reference else largest["loss"],
                loss_floor=loss_floor,
                gradient_norm=step.gradient_norm,
                stages=largest,
                excess=excess,
            )
        )
    return records
