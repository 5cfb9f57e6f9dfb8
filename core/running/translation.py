"""State of a native model from another framework, by the person's own map of names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.contracts.slot_forms import SlotForms
from isotrain.core.errors import IsotrainError
from isotrain.core.plugins.host import plugin_host
from isotrain.core.running.dialect import SLOTS, Dialect, State
from isotrain.core.running.weights_file import WEIGHTS
from isotrain.core.spec.name_maps import map_of, read_maps
from isotrain.core.spec.references import is_bare_name
from isotrain.core.spec.training_spec import TrainingSpec

LOST = "random state and what the strategy kept: of native models, each framework has its own"
LOST_SLOTS = (
    "slots of the optimizer, which the two frameworks do not keep alike, or one of them calls alike for two"
    " weights"
)


class Translation:
    """From the names that the framework which saved a checkpoint has to those of the one that goes on."""

    def __init__(self, before: Dialect, now: Dialect, slots: tuple[str, ...]) -> None:
        self._before = before
        self._now = now
        self._slots = slots

    @classmethod
    def between(cls, there: tuple[str, str], plan: Plan, spec: TrainingSpec) -> Translation | None:
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
            Dialect(map_of(maps, *owners), _forms(owners[0], spec), optimizer.name)
            for owners in (there, (plan.backend, plan.framework))
        )
        return cls(old, new, optimizer.slots)

    @staticmethod
    def is_needed(saved: Collection[str], group: ReplicaGroup) -> bool:
        """Whether a checkpoint lacks names that a group has for its weights or slots.

        It does not where portable models are in a table: they call all of it alike in all frameworks.
        """
        return not group.describe_state().keys() <= set(saved)

    def weights(self, state: State, group: ReplicaGroup) -> dict[str, np.ndarray]:
        """The weights of a group among the state, by their names here and in the order of their axes."""
        before, now = self._before.names, self._now.names
        common = {before.common(name): before.to_common(name, state[name]) for name in state}
        own = {name: now.common(name) for name in group.describe_state(WEIGHTS)}
        return {name: now.to_own(name, common[key]) for name, key in own.items() if key in common}

    def slots(self, state: State, group: ReplicaGroup, rate: float) -> dict[str, np.ndarray] | None:
        """The slots of the optimizer, and how often it has updated each weight.

        Args:
            state: That was saved; it has all weights.
            group: That goes on.
            rate: Of its next step.

        Returns:
            What was saved of them; None where they cannot be translated.
        """
        old, new = self._before, self._now
        if not rate or not (old.has_slots(self._slots) and new.has_slots(self._slots)):
            return None
        there = {old.names.common(name): name for name in state}
        here = group.describe_state(("optimizer",)).keys()
        pairs = [(there[new.names.common(w)], w) for w in group.describe_state(("trainable",))]
        were = old.slot_names([before for before, _ in pairs], self._slots, state)
        will_be = new.slot_names([weight for _, weight in pairs], self._slots, here)
        if were is None or will_be is None:
            return None
        found: dict[str, np.ndarray] = {}
        for before, weight in pairs:
            common = old.common_slots(state, before, were[before], rate)
            found |= new.own_slots(common, weight, will_be[weight], rate)
        were_kept = any(name.startswith(SLOTS) for name in state)
        return None if were_kept and not found else found


def _may_differ(model: Any) -> bool:
    """Whether each framework may have a model of its own: in a table, or by a name that stands for one."""
    return isinstance(model, Mapping) or is_bare_name(model)


def _forms(backend: str, spec: TrainingSpec) -> SlotForms | None:
    """Of a backend, which may not be known here; of a person's own optimizer nobody knows."""
    if spec.optimizer.name == "custom":
        return None
    try:
        return plugin_host(spec.plugins).backend(split_backend(backend)[0]).slot_forms
    except IsotrainError:
        return None
