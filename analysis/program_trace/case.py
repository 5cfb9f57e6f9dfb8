"""The first step and tensor at which the traces of two programs part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.program_trace.reading import GlobalStep, ProgramTrace, Tensors

Stage = Literal[
    "batch", "initial", "options", "gradient", "loss", "update", "optimizer", "state", "evaluation"
]
STAGES: dict[Stage, str] = {
    "batch": "samples of the global batch",
    "initial": "initial weight",
    "options": "option of the optimizer",
    "gradient": "gradient that the optimizer gets",
    "loss": "mean loss of the step",
    "update": "change of the weight in the step",
    "optimizer": "optimizer state",
    "state": "buffer",
    "evaluation": "samples of evaluations",
}
"""What is compared in each step, in this order; evaluations once, at the end.

Losses only where weights have no counterpart: a loss may be scaled on its way to the same gradients.
"""
_KINDS = {
    "gradient": "gradient",
    "update": "weight",
    "optimizer": "optimizer_state",
    "state": "state",
}
_BASES = {"float64": 1e-11, "float32": 1e-4}
_COARSE = 0.05
"""Floor of 16-bit floats, autocast, and exchanges in 16 bits."""
_UPDATE = 500.0
"""Factor of the floor for updates: Adam makes whole steps of elements that are rounding."""
_LARGEST = 0.5
_WITHOUT_EFFECT = ("foreach", "fused", "capturable", "differentiable")
"""Options that choose between implementations of one optimizer."""
NEGLIGIBLE = 1e-5
"""A tensor whose norm is a smaller fraction of that of its stage is rounding, as before a batch norm."""


@dataclass(frozen=True)
class Difference:
    """Something that differs between two traces.

    Attributes:
        step: Index of the step, from 0.
        optimizer: Index of the optimizer.
        stage: Kind of what differs.
        name: Name of the tensor or option; empty for samples.
        difference: Norm of the difference relative to the larger norm.
        floor: Relative difference that rounding may explain.
    """

    step: int
    optimizer: int
    stage: Stage
    name: str
    difference: float
    floor: float


@dataclass(frozen=True)
class Case:
    """The first step at which a run parts from the reference, with what differs there.

    Attributes:
        reference: Trace of the reference.
        run: Trace of the run.
        index: Index of the step among the compared ones.
        steps: Compared steps: of the reference and of the run.
        differences: What differs in the first stage that does, most significant first.
        offset: Step of the reference at which the run begins: above 0 if it goes on from there.
    """

    reference: ProgramTrace
    run: ProgramTrace
    index: int
    steps: Sequence[tuple[GlobalStep, GlobalStep]]
    differences: Sequence[Difference]
    offset: int

    @property
    def first(self) -> Difference:
        """The first difference."""
        return self.differences[0]

    @property
    def names(self) -> list[str]:
        """Names of what differs."""
        return [difference.name for difference in self.differences]

    @property
    def reference_step(self) -> GlobalStep:
        """The step of the reference."""
        return self.steps[self.index][0]

    @property
    def evaluated_rows(self) -> tuple[Counter[int], Counter[int]]:
        """The samples of evaluations, of the reference and of the run, as far as both have steps."""
        return evaluated_rows(self.reference, self.run, self.steps)

    @property
    def run_step(self) -> GlobalStep:
        """The step of the run."""
        return self.steps[self.index][1]


def common_steps(
    reference: ProgramTrace, run: ProgramTrace, offset: int
) -> Iterator[tuple[GlobalStep, GlobalStep]]:
    """The steps that both have, in the order of the run."""
    of_reference = {(step.optimizer, step.index): step for step in reference.steps}
    for step in run.steps:
        if (step.optimizer, step.index + offset) in of_reference:
            yield of_reference[step.optimizer, step.index + offset], step


def evaluated_rows(
    reference: ProgramTrace, run: ProgramTrace, steps: Sequence[tuple[GlobalStep, GlobalStep]]
) -> tuple[Counter[int], Counter[int]]:
    """Hashes of the samples of evaluations, of the reference and of the run, as far as both have steps."""
    is_whole = len(steps) == len(reference.steps) == len(run.steps)
    of_reference, of_run = zip(*steps, strict=True)
    return (
        reference.evaluated_rows(of_reference, to_the_end=is_whole),
        run.evaluated_rows(of_run, to_the_end=is_whole),
    )


def offset_of(reference: ProgramTrace, run: ProgramTrace) -> int:
    """The step of the reference after which it had the run's initial weights, plus one; else 0."""
    start = run.steps[0].first
    if not _tensor_differences(reference.steps[0].first.initial, start.initial, 1e-6):
        return 0
    for step in reference.steps:
        if step.optimizer == 0 and not _tensor_differences(step.first.weight, start.initial, 1e-6):
            return step.index + 1
    return 0


def first_case(
    reference: ProgramTrace,
    run: ProgramTrace,
    steps: Sequence[tuple[GlobalStep, GlobalStep]],
    offset: int,
) -> Case | None:
    rounding: set[str] = set()  # parameters whose gradients are nothing but rounding
    for index in range(len(steps)):
        differences = _differences(steps, index, rounding, offset)
        if differences:
            return Case(reference, run, index, steps, differences, offset)
    last = steps[-1][1]
    evaluation = Difference(last.index, last.optimizer, "evaluation", "", math.inf, 0.0)
    case = Case(reference, run, len(steps) - 1, steps, [evaluation], offset)
    rows, of_run = case.evaluated_rows
    return case if rows and of_run and rows != of_run and not offset else None


def _differences(
    steps: Sequence[tuple[GlobalStep, GlobalStep]], index: int, rounding: set[str], offset: int
) -> list[Difference]:
    """The differences in the first stage of a step that has some, the largest first."""
    one, other = steps[index]
    is_compressed = one.first.compressed or other.first.compressed
    base = _COARSE if is_compressed else min(map(_base, (one, other)))
    floor = min(_LARGEST, base * 2.0**index)  # rounding grows

    def found(stage: Stage, by_name: Mapping[str, float], at: float) -> list[Difference]:
        ordered = sorted(by_name.items(), key=lambda item: -item[1])
        return [Difference(other.index, other.optimizer, stage, *item, at) for item in ordered]

    rows, of_run = one.rows(), other.rows()
    if rows and of_run and rows != of_run:
        return found("batch", {"": math.inf}, 0.0)
    if not offset:
        initial = _tensor_differences(one.first.initial, other.first.initial, floor)
        initial |= _parting_ranks(one, other, "initial", floor)
        if initial:
            return found("initial", initial, floor)
    options = _option_differences(one.first.options, other.first.options)
    if options:
        return found("options", options, 1e-6)
    rounding |= _negligible(one.first.gradient) & _negligible(other.first.gradient)
    for stage, tensors, at in (
        ("gradient", (one.first.gradient, other.first.gradient), floor),
        ("update", (updates(steps, index, 0), updates(steps, index, 1)), _UPDATE * floor),
        ("optimizer", (one.first.optimizer_state, other.first.optimizer_state), _UPDATE * floor),
        ("state", (one.first.state, other.first.state), _UPDATE * floor),
    ):
        by_name = _tensor_differences(*tensors, min(_LARGEST, at))
        by_name |= _parting_ranks(one, other, _KINDS[stage], min(_LARGEST, at))
        if stage == "update" and (apart := _loss_difference(one, other)) > min(_LARGEST, floor):
            return found("loss", {"": apart}, floor)
        kept = {name: value for name, value in by_name.items() if not _is_of(name, rounding)}
        if kept:
            return found(stage, kept, at)  # type: ignore[arg-type]
    return []


def _loss_difference(one: GlobalStep, other: GlobalStep) -> float:
    """Relative difference of the mean losses, if a weight has no counterpart; else 0."""
    losses = one.mean_loss, other.mean_loss
    is_whole = set(one.first.gradient) >= set(other.first.gradient)
    if is_whole or not all(map(math.isfinite, losses)):
        return 0.0
    return abs(losses[0] - losses[1]) / (max(map(abs, losses)) or 1.0)


def _parting_ranks(one: GlobalStep, other: GlobalStep, kind: str, floor: float) -> dict[str, float]:
    """Tensors that differ between the processes of the run, and not between those of the reference."""
    by_name: dict[str, float] = {}
    for step in (other, one):
        first, *others = (getattr(rank, kind) for rank in step.ranks)
        parting = {
            k: v
            for tensors in others
            for k, v in _tensor_differences(first, tensors, floor).items()
        }
        by_name = {k: v for k, v in by_name.items() if k not in parting} if step is one else parting
    return by_name


def _is_of(name: str, parameters: set[str]) -> bool:
    """Whether a tensor is of one of these parameters, or is its optimizer state."""
    return name in parameters or name.rpartition("/")[0] in parameters


def updates(steps: Sequence[tuple[GlobalStep, GlobalStep]], index: int, side: int) -> Tensors:
    """Changes of the weights in a step; of the reference (`side` 0) or the run (1)."""
    step = steps[index][side]
    before: Tensors = step.first.initial
    for earlier in steps[:index]:
        if earlier[side].optimizer == step.optimizer:
            before = earlier[side].first.weight
    return {
        name: tensor_sketch.combination([1.0, -1.0], [weight, before[name]])
        for name, weight in step.first.weight.items()
        if name in before
    }


def _base(step: GlobalStep) -> float:
    """The relative difference that rounding explains in the first step."""
    dtypes = {group["dtype"] for group in step.first.groups}
    is_mixed = any(event["autocast"] for event in step.first.of_kind("forward"))
    return _COARSE if is_mixed else max(_BASES.get(dtype, _COARSE) for dtype in dtypes)


def _negligible(tensors: Tensors) -> set[str]:
    """Names of tensors whose norm is that of rounding, beside those of all."""
    whole = tensor_sketch.length([tensor.norm for tensor in tensors.values()])
    return {name for name, tensor in tensors.items() if tensor.norm <= NEGLIGIBLE * whole}


def _tensor_differences(one: Tensors, other: Tensors, floor: float) -> dict[str, float]:
    """Relative differences beyond the floor, of tensors that both have."""
    by_name = {
        name: tensor_sketch.difference(tensor, one[name])
        for name, tensor in other.items()
        if name in one
    }
    small = _negligible(one) & _negligible(other)
    return {name: value for name, value in by_name.items() if value > floor and name not in small}


def _option_differences(
    one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """Relative differences of numeric options, by `PARAMETER/OPTION`."""
    found = {}
    if one and other and not one.keys() & other.keys():  # two frameworks: rates of the first groups
        name = next(iter(other))
        rates = [
            {k: v for k, v in next(iter(o.values())).items() if k == "lr"} for o in (one, other)
        ]
        one, other = ({name: rate} for rate in rates)
    for name, options in other.items():
        for option, value in options.items():
            if option in _WITHOUT_EFFECT:
                continue
            before = one.get(name, {}).get(option, value)
            for a, b in zip(_numbers(before), _numbers(value), strict=False):
                if abs(a - b) > 1e-6 * max(abs(a), abs(b)):
                    found[f"{name}/{option}"] = abs(a - b) / max(abs(a), abs(b))
    return found


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, list | tuple) else [value]
    return [float(number) for number in values if isinstance(number, int | float)]
