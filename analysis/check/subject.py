"""The subject of a check: the spec, its planned runs, and what probes measured of data and model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.group_hooks import LayerTrait, Trait
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.state import ModelBytes
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.spec.training_spec import TrainingSpec


@dataclass(frozen=True, eq=False)
class CheckTarget:
    """A requested run that can be planned.

    Attributes:
        label: Target label, `NAME[:COLLECTIVE]@REPLICAS`.
        adapter: Backend adapter.
        plan: Plan of the run.
    """

    label: str
    adapter: Adapter
    plan: Plan

    @property
    def replicas(self) -> int:
        """Number of replicas of the model on all hosts."""
        return self.plan.replicas


@dataclass(frozen=True)
class ModelProbe:
    """Measurements by a probe process of data and model under one framework.

    Attributes:
        samples: Number of training samples; None for a stream.
        traits: Traits of the model's layers.
        fault: Error of the first step; None if it succeeded.
        notes: Notes of the replica group on such steps.
        model: Size of the model's state in bytes.
        refuses_single_sample: Layer that cannot train on a slice of one sample; None if no layer failed
            or none was tried.
        refused: Reasons for which a run of several replicas is refused, by code.
        shared_weights: Names of weights that several named updates change.
        teacher_weights: Names of trainable weights of a model that is called a teacher.
    """

    samples: int | None
    traits: tuple[LayerTrait, ...]
    fault: str | None = None
    notes: tuple[str, ...] = ()
    model: ModelBytes | None = None
    refuses_single_sample: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    shared_weights: tuple[str, ...] = ()
    teacher_weights: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelProbe:
        """Converts the plain values that the probe process returned."""
        traits = (
            LayerTrait(Trait(each["trait"]), each["layer"], each["kind"])
            for each in fields["traits"]
        )
        notes, model = tuple(fields["notes"]), ModelBytes(**fields["model"])
        measured = fields["samples"], tuple(traits), fields["fault"], notes, model
        refusals = fields["refuses_single_sample"], fields["refused"]
        weights = tuple(fields["shared_weights"]), tuple(fields["teacher_weights"])
        return cls(*measured, *refusals, *weights)

    def layers(self, trait: Trait) -> tuple[str, ...]:
        """The layers with a trait, each as `name (class)`."""
        return tuple(f"{t.layer} ({t.kind})" for t in self.traits if t.trait == trait)


@dataclass(frozen=True)
class Hit:
    """One match of a rule.

    Attributes:
        code: Code of the rule.
        field: Spec field, or `backend` or `replicas`.
        detail: Numbers and names of this case.
        targets: Labels of the targets it applies to.
        layers: Layers it is about; empty if it is not about layers.
    """

    code: str
    field: str
    detail: str
    targets: tuple[str, ...]
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """The input of every rule.

    Attributes:
        spec: Training spec to check.
        targets: Planned targets.
        strategy: Strategy of the spec.
        probes: Probe of data and model by framework; empty with `measure=False`.
        memory_saving: Strategies that need less memory, by their `--strategy` argument.
    """

    spec: TrainingSpec
    targets: tuple[CheckTarget, ...]
    strategy: Strategy
    probes: Mapping[str, ModelProbe] = field(default_factory=dict)
    memory_saving: Mapping[str, Strategy] = field(default_factory=dict)

    @property
    def several(self) -> tuple[CheckTarget, ...]:
        """The targets with more than one replica."""
        return tuple(target for target in self.targets if target.replicas > 1)

    @property
    def frameworks(self) -> list[str]:
        """The distinct frameworks of all targets, in order."""
        return list(dict.fromkeys(target.plan.framework for target in self.targets))

    def with_layers(
        self, trait: Trait, targets: Iterable[CheckTarget]
    ) -> Iterator[tuple[tuple[str, ...], list[CheckTarget]]]:
        """Yields layers with a trait, and the targets whose framework's model has them."""
        groups: dict[tuple[str, ...], list[CheckTarget]] = {}
        for target in targets:
            probe = self.probes.get(target.plan.framework)
            layers = probe.layers(trait) if probe else ()
            if layers:
                groups.setdefault(layers, []).append(target)
        yield from groups.items()

    def with_samples(self) -> Iterator[tuple[CheckTarget, int]]:
        """Yields every target whose number of training samples is known, with that number."""
        for target in self.targets:
            probe = self.probes.get(target.plan.framework)
            if probe is not None and probe.samples is not None:
                yield target, probe.samples


def labels(targets: Iterable[CheckTarget]) -> tuple[str, ...]:
    """The label of every target."""
    return tuple(target.label for target in targets)
