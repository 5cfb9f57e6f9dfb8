"""A traced run as a whole: what its processes returned, put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.records import Stage
from isotrain.analysis.parity.tensor_sketch import Fingerprint

Tensors = dict[str, Fingerprint]
Differences = dict[tuple[Stage, str], float]
"""Relative difference per stage and name."""

_OF_REPLICAS: tuple[Stage, ...] = ("gradient", "reduced")
_OF_PROCESSES: tuple[Stage, ...] = ("weight", "slot", "state")


@dataclass(frozen=True)
class StepTrace:
    """One step of a run.

    Attributes:
        step: Counted from 0 over the run.
        samples: In the global batch.
        local_batch_sizes: Samples of each replica.
        even: Whether every replica has equally many.
        loss: The mean loss of the global batch.
        learning_rate: The rate of the step.
        copies: Per stage the tensors of each replica (gradients) or process (everything else).
        tensors: Per stage the tensors that runs are compared by: the mean over the replicas of the
            gradients before reduction, and the first replica's of everything else.
    """

    step: int
    samples: int
    local_batch_sizes: list[int]
    even: bool
    loss: float
    learning_rate: float
    copies: dict[Stage, list[Tensors]]
    tensors: dict[Stage, Tensors]

    @property
    def update(self) -> Tensors:
        """The gradients that the weights were updated with, as well as they are known."""
        return self.tensors["reduced"] or self.tensors["gradient"]

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients after the reduction."""
        return tensor_sketch.length([tensor.norm for tensor in self.update.values()])


@dataclass(frozen=True)
class RunTrace:
    """A run.

    Attributes:
        name: As in `RunRecord`.
        precision: What it computed in.
        replicas: How many.
        steps: Those that were traced.
        start: Weights and non-trainable state before the first step.
        initializer_start: The same as the run's own initializers left them.
        again: The gradients before reduction of the first step, computed once more with random streams
            that have moved on.
        evaluation_loss: The first batch's loss at the start in evaluation mode.
        plan: The plan it followed.
        notes: How it took its steps, where that was asked for.
    """

    name: str
    precision: str
    replicas: int
    steps: list[StepTrace]
    start: dict[Stage, Tensors]
    initializer_start: dict[Stage, Tensors]
    again: Tensors
    evaluation_loss: float
    plan: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def before(self, index: int, stage: Stage) -> Tensors:
        """The state before the step of that index."""
        return self.steps[index - 1].tensors[stage] if index else self.start[stage]


def assemble_trace(name: str, returned: Sequence[Mapping[str, Any]]) -> RunTrace:
    """Makes a run's trace of what its processes returned, by rank."""
    main = returned[0]
    again = [_tensors(own) for process in returned for own in process["probe"]["again"]]
    return RunTrace(
        name=name,
        precision=main["plan"]["precision"],
        replicas=main["plan"]["replicas"],
        steps=[_step([process["steps"][i] for process in returned]) for i in _indices(main)],
        start={stage: _tensors(main["start"][stage]) for stage in _OF_PROCESSES},
        initializer_start={
            stage: _tensors(main["initializer_start"][stage]) for stage in _OF_PROCESSES
        },
        again=tensor_sketch.means(again),
        evaluation_loss=main["probe"]["evaluation_loss"],
        plan=main["plan"],
        notes=main["notes"],
    )


def _indices(returned: Mapping[str, Any]) -> range:
    return range(len(returned["steps"]))


def _step(parts: Sequence[Mapping[str, Any]]) -> StepTrace:
    """One step of all processes."""
    copies: dict[Stage, list[Tensors]] = {
        stage: [_tensors(own) for part in parts for own in part[stage]] for stage in _OF_REPLICAS
    }
    copies |= {stage: [_tensors(part[stage]) for part in parts] for stage in _OF_PROCESSES}
    tensors = {stage: found[0] if found else {} for stage, found in copies.items()}
    main = parts[0]
    return StepTrace(
        step=main["step"],
        samples=main["size"],
        local_batch_sizes=[share for part in parts for share in part["local_batch_sizes"]],
        even=main["even"],
        loss=main["loss"],
        learning_rate=main["learning_rate"],
        copies=copies,
        tensors=tensors | {"gradient": tensor_sketch.means(copies["gradient"])},
    )


def _tensors(prints: Mapping[str, Any]) -> Tensors:
    return {name: tensor_sketch.from_list(fields) for name, fields in prints.items()}


def differences(run: StepTrace, reference: StepTrace) -> Differences:
    """How far each tensor of a step, and its loss, is from the reference's, in the order of the stages."""
    found: Differences = {}
    for stage in (*_OF_REPLICAS, *_OF_PROCESSES):
        for name, tensor in run.tensors[stage].items():
            other = reference.tensors[stage].get(name)
            if other is not None:
                found[stage, name] = tensor_sketch.difference(tensor, other)
    found["loss", "loss"] = relative(run.loss, reference.loss)
    return found


def relative(one: float, other: float) -> float:
    """The difference of two numbers relative to the larger; infinite where just one is finite."""
    if math.isfinite(one) != math.isfinite(other):
        return math.inf
    scale = max(abs(one), abs(other))
    return abs(one - other) / scale if scale and math.isfinite(scale) else 0.0


def furthest_start(run: RunTrace, reference: RunTrace) -> tuple[str, float]:
    """The weight that the run's own initializers set furthest from the reference's, and how far."""
    found = {
        name: tensor_sketch.difference(tensor, reference.start["weight"][name])
        for name, tensor in run.initializer_start["weight"].items()
        if name in reference.start["weight"]
    }
    return max(found.items(), key=lambda pair: pair[1], default=("", 0.0))


def not_compared(run: RunTrace, reference: RunTrace) -> dict[Stage, list[str]]:
    """The tensors that have no counterpart in the reference, per stage."""
    last, other = run.steps[-1], reference.steps[-1]
    found: dict[Stage, list[str]] = {}
    for stage in (*_OF_REPLICAS, *_OF_PROCESSES):
        alone = [name for name in last.tensors[stage] if name not in other.tensors[stage]]
        if alone:
            found[stage] = alone
    return found
