"""What a check looks at: the spec, the runs it would be, and what was seen of data and model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.replica_group import LayerTrait, Trait
from isotrain.core.contracts.state import ModelBytes
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.spec.training_spec import TrainingSpec


@dataclass(frozen=True, eq=False)
class CheckTarget:
    """One run that was asked about, and that can be planned.

    Attributes:
        label: `NAME[:COLLECTIVE]@REPLICAS`.
        adapter: The backend's.
        plan: Of the run.
    """

    label: str
    adapter: Adapter
    plan: Plan

    @property
    def replicas(self) -> int:
        """Of the model, in all."""
        return self.plan.replicas


@dataclass(frozen=True)
class ModelProbe:
    """What a process of one framework saw.

    Attributes:
        samples: In the training data; None for a stream.
        traits: Of the model's layers.
        fault: What went wrong in a first step.
        notes: Of the replica group, on such steps.
        model: What the state of the model takes.
        refuses_single_sample: A layer that cannot be trained on a slice of one sample, where one was tried.
        refused: What a run of several replicas is refused for, by code.
    """

    samples: int | None
    traits: tuple[LayerTrait, ...]
    fault: str | None = None
    notes: tuple[str, ...] = ()
    model: ModelBytes | None = None
    refuses_single_sample: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelProbe:
        """Makes it from what the process returned."""
        traits = (
            LayerTrait(Trait(each["trait"]), each["layer"], each["kind"])
            for each in fields["traits"]
        )
        notes, model = tuple(fields["notes"]), ModelBytes(**fields["model"])
        found = fields["samples"], tuple(traits), fields["fault"], notes, model
        return cls(*found, fields["refuses_single_sample"], fields["refused"])

    def layers(self, trait: Trait) -> tuple[str, ...]:
        """The layers that have a trait, each with its class."""
        return tuple(f"{t.layer} ({t.kind})" for t in self.traits if t.trait == trait)


@dataclass(frozen=True)
class Hit:
    """One thing that a rule found.

    Attributes:
        code: The rule's.
        field: Of the spec, or `backend` or `replicas`.
        detail: The numbers and names of this case.
        targets: Labels of those it holds for.
        layers: Of the model, where it is about some.
    """

    code: str
    field: str
    detail: str
    targets: tuple[str, ...]
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """Everything that rules look at.

    Attributes:
        spec: What would be trained.
        targets: Where.
        strategy: The spec's.
        probes: By framework; empty where nothing was started.
        memory_saving: Strategies that take less memory, by what is given as `--strategy`.
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
        """The frameworks of all targets, each once."""
        return list(dict.fromkeys(target.plan.framework for target in self.targets))

    def with_layers(
        self, trait: Trait, targets: Iterable[CheckTarget]
    ) -> Iterator[tuple[tuple[str, ...], list[CheckTarget]]]:
        """Groups targets by the layers of that trait which their framework's model has."""
        groups: dict[tuple[str, ...], list[CheckTarget]] = {}
        for target in targets:
            probe = self.probes.get(target.plan.framework)
            layers = probe.layers(trait) if probe else ()
            if layers:
                groups.setdefault(layers, []).append(target)
        yield from groups.items()

    def with_samples(self) -> Iterator[tuple[CheckTarget, int]]:
        """The targets whose number of samples is known, with that number."""
        for target in self.targets:
            probe = self.probes.get(target.plan.framework)
            if probe is not None and probe.samples is not None:
                yield target, probe.samples


def labels(targets: Iterable[CheckTarget]) -> tuple[str, ...]:
    """The labels of targets."""
    return tuple(target.label for target in targets)
