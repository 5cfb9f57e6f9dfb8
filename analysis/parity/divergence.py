"""Decides of two traced runs whether rounding explains what lies between them, or a difference."""

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
"""A difference that float64 shrinks to less than this part of it is rounding: 2^-29 is what one expects
of it at the start, and chaotic growth may give some of that back."""

RerunInFloat64 = Callable[[], tuple[RunTrace, RunTrace, NoiseFloor] | None]
"""Gives the run and the reference once more in float64, and the floor there; None if that failed."""


@dataclass(frozen=True)
class RunVerdict:
    """What became of one run; the fields are those of `RunRecord`."""

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
        spec: What was trained.
        run: The run.
        reference: What it is compared with; the same steps were traced.
        floor: The noise floor around the reference.
        other_precision: The reference in another precision, if that run went well.
        in_float64: Called when the run parts in a lower precision.
    """
    divergences = find_divergences(run, reference, floor)
    if not divergences:
        return RunVerdict(*_agreement(run, reference, floor), None, [], [], None)
    confirmed = None
    again = in_float64() if reference.precision != "float64" else None
    if again is not None:
        clearer = _clearer(divergences[0], *again)
        confirmed = _difference_at(divergences[0], again[0], again[1])
        if not clearer:
            return RunVerdict(
                "rounding", _shrunk(divergences[0], confirmed), None, [], [], confirmed
            )
        run, reference, floor = again
        other_precision = None
        divergences = clearer
    first = divergences[0]
    there = [p for p in divergences if (p.step, p.stage) == (first.step, first.stage)]
    there.sort(key=lambda p: p.difference / p.floor if p.floor else math.inf, reverse=True)
    case = DivergenceCase(spec, run, reference, floor, there, other_precision)
    reason = (
        f"{STAGES[first.stage]} {first.name!r} parts in step {first.step}: relative difference"
        f" {first.difference:.2g}, noise floor {first.floor:.2g}"
    )
    if first.precision != reference.plan["precision"] or confirmed is not None:
        reason += ", in float64, where rounding would be far smaller"
    return RunVerdict("difference", f"{reason}.", first, there, likely_causes(case), confirmed)


def find_divergences(run: RunTrace, reference: RunTrace, floor: NoiseFloor) -> list[Divergence]:
    """Every tensor of every step that is beyond the floor, in the order of steps and stages."""
    found = []
    for index, (step, other) in enumerate(zip(run.steps, reference.steps, strict=True)):
        for (stage, name), value in differences(step, other).items():
            bound = bound_of(floor, index, step, stage, name)
            if value > bound:
                found.append(Divergence(step.step, stage, name, value, bound, floor.precision))
    return found


def bound_of(floor: NoiseFloor, index: int, step: StepTrace, stage: Stage, name: str) -> float:
    """The noise floor of a tensor; whole numbers have none."""
    tensor = step.tensors.get(stage, {}).get(name)
    return 0.0 if tensor is not None and not tensor.floating else floor.at(index, stage, name)


def _clearer(
    first: Divergence, run: RunTrace, reference: RunTrace, floor: NoiseFloor
) -> list[Divergence]:
    """What parts in float64, small side effects left out; empty where all of it was rounding."""
    found = find_divergences(run, reference, floor)
    return [p for p in found if p.difference > SHRUNK * min(first.difference, 1.0)]


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
        f"no tensor parts by more than the noise floor; the nearest to it is"
        f" {STAGES[stage]} {name!r} with {nearest:.2g} of the floor."
    )


def step_records(run: RunTrace, reference: RunTrace, floor: NoiseFloor) -> list[StepRecord]:
    """The steps of a run beside the reference's."""
    records = []
    for index, (step, other) in enumerate(zip(run.steps, reference.steps, strict=True)):
        loss_floor = floor.at(index, "loss", "loss")
        largest: dict[str, float] = {}
        excess: dict[str, float] = {}
        own = run is reference
        for (stage, name), value in ({} if own else differences(step, other)).items():
            bound = bound_of(floor, index, step, stage, name)
            ratio = value / bound if bound else (math.inf if value else 0.0)
            largest[stage] = max(largest.get(stage, 0.0), value)
            excess[stage] = max(excess.get(stage, 0.0), ratio)
        records.append(
            StepRecord(
                step=step.step,
                samples=step.samples,
                loss=step.loss,
                loss_difference=None if own else largest["loss"],
                loss_floor=loss_floor,
                gradient_norm=step.gradient_norm,
                stages=largest,
                excess=excess,
            )
        )
    return records
