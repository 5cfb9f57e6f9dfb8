"""Conversion of a native model's state between frameworks, by the name map `checkpoint.map` of the spec."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.contracts.state import OptimizerStateNames
from isotrain.core.errors import IsotrainError
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.weights.state_format import OPTIMIZER_PREFIX, State, StateFormat
from isotrain.core.session.weights.weights_file import WEIGHTS
from isotrain.core.spec.import_strings import is_bare_name
from isotrain.core.spec.optimizer_groups import options_by_weight
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.weight_name_map import map_of, read_maps

LOST_STATE = "random state and strategy state: of native models, each framework has its own"
LOST_OPTIMIZER_STATE = (
    "optimizer state, which the two frameworks do not keep alike, or one of them gives one name for two"
    " weights"
)


@dataclass(frozen=True)
class StateSource:
    """Names of a weight and its optimizer state in a checkpoint, and of the latter in this run.

    Attributes:
        weight: Name of the weight in the checkpoint.
        slots: Names of its optimizer state and update count in the checkpoint, by slot.
        target_names: Names of its optimizer state in this run, by slot.
        rate: Its learning rate.
    """

    weight: str
    slots: Mapping[str, str] = field(default_factory=dict)
    target_names: Mapping[str, str] = field(default_factory=dict)
    rate: float = 1.0

    @property
    def names(self) -> list[str]:
        """Names of all state to read."""
        return [self.weight, *self.slots.values()]


class StateConverter:
    """Converts state from the format of the framework that saved a checkpoint to this run's format.

    Args:
        source_format: Format of the saved state.
        target_format: Format of this run's state.
        optimizer: Optimizer section of the spec.
    """

    def __init__(
        self, source_format: StateFormat, target_format: StateFormat, optimizer: Any
    ) -> None:
        self._source_format = source_format
        self._target_format = target_format
        self._optimizer = optimizer
        self._slots: tuple[str, ...] = optimizer.slots

    @classmethod
    def between(
        cls, source: tuple[str, str], plan: Plan, spec: TrainingSpec
    ) -> StateConverter | None:
        """The converter for a checkpoint of a backend and its framework; None where no conversion applies.

        None applies without `checkpoint.map`, within one framework, and if the spec has one model for all
        frameworks.
        """
        policy, optimizer = spec.checkpoint, spec.optimizer
        if policy is None or policy.map is None or source[1] == plan.framework:
            return None
        if not _may_differ(spec.model):
            return None
        maps = read_maps(policy.map)
        source_format, target_format = (
            StateFormat(map_of(maps, *keys), _optimizer_state_names(keys[0], spec), optimizer.name)
            for keys in (source, (plan.backend, plan.framework))
        )
        return cls(source_format, target_format, optimizer)

    @staticmethod
    def is_needed(saved: Collection[str], group: ReplicaGroup) -> bool:
        """Whether a checkpoint lacks names of the group's weights or optimizer state.

        Portable models have the same names in all frameworks, also where a table lists one per framework.
        """
        return not group.describe_state().keys() <= set(saved)

    def state_sources(self, saved: Collection[str], group: ReplicaGroup) -> dict[str, StateSource]:
        """Sources of the group's weights, by weight name; without those that were not saved."""
        saved_names = {self._source_format.names.common(name): name for name in saved}
        common_names = {
            name: self._target_format.names.common(name) for name in group.describe_state(WEIGHTS)
        }
        return {
            name: StateSource(saved_names[common])
            for name, common in common_names.items()
            if common in saved_names
        }

    def with_optimizer_state(
        self,
        sources: Mapping[str, StateSource],
        saved: Collection[str],
        group: ReplicaGroup,
        rates: Mapping[int | None, float],
    ) -> dict[str, StateSource] | None:
        """Adds optimizer state and update counts to the sources of all weights, by weight name.

        Args:
            sources: Sources of the weights, by weight name.
            saved: Names of the saved state.
            group: Replica group of this run.
            rates: Learning rates of the schedules of optimizer groups, by index; under None, the run's.

        Returns:
            The sources; None where the saved optimizer state cannot be converted.
        """
        old, new = self._source_format, self._target_format
        formats = old, new
        if not all(each.has_optimizer_state(self._slots) for each in formats):
            return None
        if not all(rates.values()) and any(each.scales_by_rate(self._slots) for each in formats):
            return None
        existing = group.describe_state(("optimizer",)).keys()
        trainable = {name: sources[name].weight for name in group.describe_state(("trainable",))}
        old_names = old.resolve_names(list(trainable.values()), self._slots, saved)
        new_names = new.resolve_names(list(trainable), self._slots, existing)
        if old_names is None or new_names is None:
            return None
        options = options_by_weight(self._optimizer, list(trainable))
        complete = {
            name: StateSource(
                saved_name,
                old.stored_names(saved_name, old_names[saved_name], saved),
                new_names[name],
                rates[options[name].schedule] * options[name].lr_factor,
            )
            for name, saved_name in trainable.items()
        }
        was_saved = any(name.startswith(OPTIMIZER_PREFIX) for name in saved)
        is_lost = was_saved and not any(source.slots for source in complete.values())
        return None if is_lost else {**sources, **complete}

    def state(self, name: str, source: StateSource, saved: State) -> dict[str, np.ndarray]:
        """Converts a weight and its optimizer state, any shapes, to this run's names and axis order."""
        old, new = self._source_format, self._target_format
        weight = new.names.to_model(name, old.names.to_common(source.weight, saved[source.weight]))
        if not source.slots:
            return {name: weight}
        common = old.to_common_state(saved, source.weight, source.slots, source.rate)
        return {name: weight, **new.to_local_state(common, name, source.target_names, source.rate)}


def _may_differ(model: Any) -> bool:
    """Whether the spec may have a model per framework: a table of models, or a registered name."""
    return isinstance(model, Mapping) or is_bare_name(model)


def _optimizer_state_names(backend: str, spec: TrainingSpec) -> OptimizerStateNames | None:
    """The backend's names of optimizer state; None for an unknown backend or a custom optimizer."""
    if spec.optimizer.name == "custom":
        return None
    try:
        return plugin_manager(spec.plugins).backend(split_backend(backend)[0]).optimizer_state_names
    except IsotrainError:
        return None
