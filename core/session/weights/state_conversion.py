"""State of a native model from another framework, by the person's own map of names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.contracts.state import OptimizerStateNames
from isotrain.core.errors import IsotrainError
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.weights.state_format import OPTIMIZER_PREFIX, State, StateFormat
from isotrain.core.session.weights.weights_file import WEIGHTS
from isotrain.core.spec.import_strings import is_bare_name
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.weight_name_map import map_of, read_maps

LOST_STATE = "random state and what the strategy kept: of native models, each framework has its own"
LOST_OPTIMIZER_STATE = (
    "slots of the optimizer, which the two frameworks do not keep alike, or one of them calls alike for two"
    " weights"
)


@dataclass(frozen=True)
class StateSource:
    """Where a checkpoint has what belongs to a weight.

    Attributes:
        weight: Its name there.
        slots: Those of its slots there, by how the spec calls them; and of its steps.
        target_names: What its slots are called here.
    """

    weight: str
    slots: Mapping[str, str] = field(default_factory=dict)
    target_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Of all that is read."""
        return [self.weight, *self.slots.values()]


class StateConverter:
    """From the names that the framework which saved a checkpoint has to those of the one that goes on."""

    def __init__(self, before: StateFormat, now: StateFormat, slots: tuple[str, ...]) -> None:
        self._before = before
        self._now = now
        self._slots = slots

    @classmethod
    def between(
        cls, there: tuple[str, str], plan: Plan, spec: TrainingSpec
    ) -> StateConverter | None:
        """The one that the spec gives; None where there is nothing to translate.

        That is where it gives none, where the framework is the same, and of one model for all frameworks.

        Args:
            there: Backend and framework of the run that saved the checkpoint.
            plan: Of the run that goes on.
            spec: Of the same.
        """
        policy, optimizer = spec.checkpoint, spec.optimizer
        if policy is None or policy.map is None or there[1] == plan.framework:
            return None
        if not _may_differ(spec.model):
            return None
        maps = read_maps(policy.map)
        old, new = (
            StateFormat(map_of(maps, *owners), _forms(owners[0], spec), optimizer.name)
            for owners in (there, (plan.backend, plan.framework))
        )
        return cls(old, new, optimizer.slots)

    @staticmethod
    def is_needed(saved: Collection[str], group: ReplicaGroup) -> bool:
        """Whether a checkpoint lacks names that a group has for its weights or slots.

        It does not where portable models are in a table: they call all of it alike in all frameworks.
        """
        return not group.describe_state().keys() <= set(saved)

    def state_sources(self, saved: Collection[str], group: ReplicaGroup) -> dict[str, StateSource]:
        """Where the weights of a group are found: of those that were saved, by their names here."""
        there = {self._before.names.common(name): name for name in saved}
        own = {name: self._now.names.common(name) for name in group.describe_state(WEIGHTS)}
        return {name: StateSource(there[key]) for name, key in own.items() if key in there}

    def with_optimizer_state(
        self,
        origins: Mapping[str, StateSource],
        saved: Collection[str],
        group: ReplicaGroup,
        rate: float,
    ) -> dict[str, StateSource] | None:
        """Where their slots are found too, and how often the optimizer has updated each.

        Args:
            origins: Of all weights.
            saved: The names of all that was saved.
            group: That goes on.
            rate: Of its next step.

        Returns:
            None where what was saved of them cannot be translated.
        """
        old, new = self._before, self._now
        if not rate or not (
            old.has_optimizer_state(self._slots) and new.has_optimizer_state(self._slots)
        ):
            return None
        here = group.describe_state(("optimizer",)).keys()
        trained = {name: origins[name].weight for name in group.describe_state(("trainable",))}
        were = old.resolve_names(list(trained.values()), self._slots, saved)
        will_be = new.resolve_names(list(trained), self._slots, here)
        if were is None or will_be is None:
            return None
        found = {
            name: StateSource(before, old.stored_names(before, were[before], saved), will_be[name])
            for name, before in trained.items()
        }
        were_kept = any(name.startswith(OPTIMIZER_PREFIX) for name in saved)
        is_lost = were_kept and not any(origin.slots for origin in found.values())
        return None if is_lost else {**origins, **found}

    def state(
        self, name: str, origin: StateSource, saved: State, rate: float
    ) -> dict[str, np.ndarray]:
        """A weight and its slots, by their names here and in the order of their axes.

        Args:
            name: Of the weight here.
            origin: Of it.
            saved: All that its origin names.
            rate: Of the next step.
        """
        old, new = self._before, self._now
        weight = new.names.to_model(name, old.names.to_common(origin.weight, saved[origin.weight]))
        if not origin.slots:
            return {name: weight}
        common = old.to_common_state(saved, origin.weight, origin.slots, rate)
        return {name: weight, **new.to_local_state(common, name, origin.target_names, rate)}


def _may_differ(model: Any) -> bool:
    """Whether each framework may have a model of its own: in a table, or by a name that stands for one."""
    return isinstance(model, Mapping) or is_bare_name(model)


def _forms(backend: str, spec: TrainingSpec) -> OptimizerStateNames | None:
    """Of a backend, which may not be known here; of a person's own optimizer nobody knows."""
    if spec.optimizer.name == "custom":
        return None
    try:
        return plugin_manager(spec.plugins).backend(split_backend(backend)[0]).optimizer_state_names
    except IsotrainError:
        return None
