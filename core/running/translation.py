"""Weights of a native model from another framework, by the person's own map of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.contracts.plan import Plan
from isotrain.core.running.weights_file import WEIGHTS
from isotrain.core.spec.name_maps import NameMap, read_maps
from isotrain.core.spec.references import is_bare_name
from isotrain.core.spec.training_spec import TrainingSpec

LOST = (
    "slots of the optimizer, scale of the loss, random state and what the strategy kept: of native models,"
    " each framework has its own"
)


class Translation:
    """From the names that the framework which saved a checkpoint has to those of the one that goes on."""

    def __init__(self, before: NameMap, now: NameMap) -> None:
        self._before = before
        self._now = now

    @classmethod
    def between(
        cls, before: Mapping[str, Any], plan: Plan, spec: TrainingSpec
    ) -> Translation | None:
        """The one that the spec gives; None where there is nothing to translate.

        That is where it gives none, where the framework is the same, and of a portable model, whose state has
        the same names in all.

        Args:
            before: The plan of the run that saved the checkpoint.
            plan: Of the run that goes on.
            spec: Of the same.
        """
        policy = spec.checkpoint
        if policy is None or policy.map is None or before.get("framework") == plan.framework:
            return None
        if not _may_differ(spec.model):
            return None
        maps = read_maps(policy.map)
        return cls(
            _map_of(maps, before.get("backend"), before.get("framework")),
            _map_of(maps, plan.backend, plan.framework),
        )

    def weights(
        self, state: Mapping[str, np.ndarray], group: ReplicaGroup
    ) -> dict[str, np.ndarray]:
        """The weights of a group among the state, by their names here and in the order of their axes."""
        before, now = self._before, self._now
        common = {before.common(name): before.to_common(name, state[name]) for name in state}
        own = {name: now.common(name) for name in group.describe_state(WEIGHTS)}
        return {name: now.to_own(name, common[key]) for name, key in own.items() if key in common}


def _may_differ(model: Any) -> bool:
    """Whether each framework may have a model of its own: in a table, or by a name that stands for one."""
    return isinstance(model, Mapping) or is_bare_name(model)


def _map_of(maps: Mapping[str, NameMap], *owners: Any) -> NameMap:
    return next((maps[owner] for owner in owners if owner in maps), NameMap({}))
