"""The trace of a run, assembled from what its processes returned."""

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
_OF_PROCESSES: tuple[Stage, ...] = ("weight", "optimizer", "state")


@dataclass(frozen=True)
class StepTrace:
    """One step of a run.

    Attributes:
        step: Step index, from 0 over the run.
        samples: Number of samples in the global batch.
        local_batch_sizes: Number of samples of each replica.
        even: Whether all local batches are equally large.
        loss: Mean loss of the global batch.
        learning_rate: Learning rate of the step.
        copies: Tensors of each replica (gradients) or process (all other stages), by stage.
        tensors: Tensors that runs are compared by, by stage: the mean over replicas of the gradients
            before reduction, and the first copy of everything else.
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
        """The reduced gradients; where a backend does not show them, the mean before reduction."""
        return self.tensors["reduced"] or self.tensors["gradient"]

    @property
    def gradient_norm(self) -> float:
        """The Euclidean norm over all gradients after the reduction."""
        return tensor_sketch.length([tensor.norm for tensor in self.update.values()])


@dataclass(frozen=True)
class RunTrace:
    """The trace of a run.

    Attributes:
        name: Run name, as in `RunRecord`.
        precision: Precision of the computation, such as `float32`.
        replicas: Number of replicas.
        steps: Traces of the traced steps.
        start: State before the first step, by stage.
        initializer_start: State that the run's own initializers made, by stage.
        again: Mean gradients of the first step, computed a second time with advanced random streams.
        evaluation_loss: Loss of the first batch in evaluation mode before the first step.
        plan: Plan of the run as plain values.
        notes: Notes on how the run takes its steps, if they were collected.
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
        """The state of a stage before the traced step with that index."""
        return self.steps[index - 1].tensors[stage] if index else self.start[stage]


def assemble_trace(name: str, returned: Sequence[Mapping[str, Any]]) -> RunTrace:
    """Assembles a run's trace from what its processes returned, in rank order."""
    main = returned[0]
    again = [tensors_of(prints) for process in returned for prints in process["probe"]["again"]]
    return RunTrace(
        name=name,
        precision=main["plan"]["precision"],
        replicas=main["plan"]["replicas"],
        steps=[
            _step([process["steps"][i] for process in returned]) for i in range(len(main["steps"]))
        ],
        start={stage: tensors_of(main["start"][stage]) for stage in _OF_PROCESSES},
        initializer_start={
            stage: tensors_of(main["initializer_start"][stage]) for stage in _OF_PROCESSES
        },
        again=tensor_sketch.means(again),
        evaluation_loss=main["probe"]["evaluation_loss"],
        plan=main["plan"],
        notes=main["notes"],
    )


def _step(parts: Sequence[Mapping[str, Any]]) -> StepTrace:
    """Assembles a step from the parts that all processes returned."""
    copies: dict[Stage, list[Tensors]] = {
        stage: [tensors_of(prints) for part in parts for prints in part[stage]]
        for stage in _OF_REPLICAS
    }
    copies |= {stage: [tensors_of(part[stage]) for part in parts] for stage in _OF_PROCESSES}
    tensors = {stage: replicas[0] if replicas else {} for stage, replicas in copies.items()}
    main = parts[0]
    return StepTrace(
        step=main["step"],
        samples=main["size"],
        local_batch_sizes=[size for part in parts for size in part["local_batch_sizes"]],
        even=main["even"],
        loss=main["loss"],
        learning_rate=main["learning_rate"],
        copies=copies,
        tensors=tensors | {"gradient": tensor_sketch.means(copies["gradient"])},
    )


def tensors_of(prints: Mapping[str, Any]) -> Tensors:
    """Fingerprints of what a process has returned for them, by name."""
    return {name: tensor_sketch.from_list(fields) for name, fields in prints.items()}


def differences(run: StepTrace, reference: StepTrace) -> Differences:
    """The relative difference of each tensor and the loss to the reference, in the order of the stages."""
    by_tensor: Differences = {}
    for stage in (*_OF_REPLICAS, *_OF_PROCESSES):
        for name, tensor in run.tensors[stage].items():
            other = reference.tensors[stage].get(name)
            if other is not None:
                by_tensor[stage, name] = tensor_sketch.difference(tensor, other)
    by_tensor["loss", "loss"] = relative(run.loss, reference.loss)
    return by_tensor


def relative(one: float, other: float) -> float:
    """The relative difference of two numbers; infinite if only one of them is finite."""
    if math.isfinite(one) != math.isfinite(other):
        return math.inf
    scale = max(abs(one), abs(other))
    return abs(one - other) / scale if scale and math.isfinite(scale) else 0.0


def furthest_start(run: RunTrace, reference: RunTrace) -> tuple[str, float]:
    """The weight whose initialization differs most from the reference's, and its relative difference."""
    differences_by_name = {
        name: tensor_sketch.difference(tensor, reference.start["weight"][name])
        for name, tensor in run.initializer_start["weight"].items()
        if name in reference.start["weight"]
    }
    return max(differences_by_name.items(), key=lambda pair: pair[1], default=("", 0.0))


def not_compared(run: RunTrace, reference: RunTrace) -> dict[Stage, list[str]]:
    """Names of the tensors without a counterpart in the reference, by stage."""
    last, other = run.steps[-1], reference.steps[-1]
    names_by_stage: dict[Stage, list[str]] = {}
    for stage in (*_OF_REPLICAS, *_OF_PROCESSES):
        alone = [name for name in last.tensors[stage] if name not in other.tensors[stage]]
        if alone:
            names_by_stage[stage] = alone
    return names_by_stage
