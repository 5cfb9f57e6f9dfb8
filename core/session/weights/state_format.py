"""State format: names, axis order and scaling of a native model's state in one framework.

Conversions between frameworks go through the common format: the names, axis order and optimizer state that
the spec defines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from isotrain.core.contracts.state import OptimizerStateNames
from isotrain.core.spec.weight_name_map import NameMap


def match_names(
    candidates: Mapping[str, Sequence[str]], existing: Collection[str]
) -> dict[str, str] | None:
    """Assigns one state name to each weight, by elimination.

    Args:
        candidates: Possible names of one kind of optimizer state, by weight, the likeliest first.
        existing: Names of the existing state.

    Returns:
        The name for each weight, which need not exist yet; None where it is ambiguous.
    """
    matched: dict[str, str] = {}
    remaining = {
        weight: [name for name in names if name in existing] or list(names[:1])
        for weight, names in candidates.items()
    }
    while unique := {weight: names[0] for weight, names in remaining.items() if len(names) == 1}:
        matched |= unique
        remaining = {
            weight: [name for name in names if name not in unique.values()]
            for weight, names in remaining.items()
            if weight not in unique
        }
    return None if remaining or len(set(matched.values())) < len(matched) else matched


State = Mapping[str, np.ndarray]
OPTIMIZER_PREFIX = "optimizer/"
"""Prefix of the names of optimizer state."""
STEPS = "steps"
"""Name of a weight's update count in the common format."""


@dataclass(frozen=True)
class StateFormat:
    """Format of a run's model and optimizer state.

    Attributes:
        names: Map of weight names and axis orders to the common ones.
        optimizer_state_names: The backend's names of optimizer state; None where they are unknown.
        optimizer: Name of the optimizer in the spec.
    """

    names: NameMap
    optimizer_state_names: OptimizerStateNames | None
    optimizer: str

    def has_optimizer_state(self, slots: Collection[str]) -> bool:
        """Whether the names of all these optimizer slots are known."""
        state_names = self.optimizer_state_names
        return state_names is not None and all(
            state_names.slot(self.optimizer, "", slot) for slot in slots
        )

    def scales_by_rate(self, slots: Collection[str]) -> bool:
        """Whether one of these slots, whose names are known, is in units of the learning rate."""
        assert self.optimizer_state_names is not None
        factor = self.optimizer_state_names.rate_factor
        return any(factor(self.optimizer, slot) is not None for slot in slots)

    def resolve_names(
        self, weights: Sequence[str], slots: Collection[str], existing: Collection[str]
    ) -> dict[str, dict[str, str]] | None:
        """Names of the weights' optimizer state, by weight and slot.

        Returns:
            The names, which need not exist yet; None where a name could belong to several weights.
        """
        resolved: dict[str, dict[str, str]] = {weight: {} for weight in weights}
        for slot in slots:
            names = match_names(self._candidates(weights, slot), existing)
            if names is None:
                return None
            for weight, name in names.items():
                resolved[weight][slot] = name
        return resolved

    def _candidates(self, weights: Sequence[str], slot: str) -> dict[str, list[str]]:
        """Possible names of one optimizer slot, by weight."""
        assert self.optimizer_state_names is not None
        return {
            weight: [
                OPTIMIZER_PREFIX + name
                for name in self.optimizer_state_names.slot(self.optimizer, weight, slot)
            ]
            for weight in weights
        }

    def stored_names(
        self, weight: str, names: Mapping[str, str], existing: Collection[str]
    ) -> dict[str, str]:
        """Names of a weight's existing optimizer state, by slot, with its update count under `STEPS`."""
        assert self.optimizer_state_names is not None
        steps = self.optimizer_state_names.steps(self.optimizer, weight)
        with_steps = names if steps is None else {**names, STEPS: OPTIMIZER_PREFIX + steps}
        return {slot: name for slot, name in with_steps.items() if name in existing}

    def to_common_state(
        self, state: State, weight: str, stored_names: Mapping[str, str], rate: float
    ) -> dict[str, np.ndarray]:
        """Converts a weight's optimizer state, of its shape, to common scaling and axis order, by slot."""
        return {
            slot: state[name]
            if slot == STEPS
            else self.names.to_common(weight, state[name]) * self._factor(slot, rate)
            for slot, name in stored_names.items()
        }

    def to_local_state(
        self, common: State, weight: str, names: Mapping[str, str], rate: float
    ) -> dict[str, np.ndarray]:
        """Converts a weight's optimizer state from the common format to this one's names and shapes."""
        assert self.optimizer_state_names is not None
        state = {}
        for slot in common.keys() - {STEPS}:
            factor = (
                self._factor(slot, rate) or 1.0
            )  # with lr_factor 0, the common momentum is 0 too
            state[names[slot]] = self.names.to_model(weight, common[slot]) / factor
        steps = self.optimizer_state_names.steps(self.optimizer, weight)
        if steps is not None and STEPS in common:
            state[OPTIMIZER_PREFIX + steps] = common[STEPS]
        return state

    def _factor(self, slot: str, rate: float) -> float:
        """Factor from this format's optimizer state to the common one."""
        assert self.optimizer_state_names is not None
        factor = self.optimizer_state_names.rate_factor(self.optimizer, slot)
        return 1.0 if factor is None else factor * rate
