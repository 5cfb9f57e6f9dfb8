"""How one framework calls and keeps the state of a native model, beside how all do in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from isotrain.core.contracts.state import OptimizerStateNames
from isotrain.core.spec.weight_name_map import NameMap


def match_names(
    candidates: Mapping[str, Sequence[str]], known: Collection[str]
) -> dict[str, str] | None:
    """Tells whose each name is, where it may be that of several weights.

    Args:
        candidates: What one slot of each weight may be called, the likeliest first.
        known: The names that there are.

    Returns:
        What that of each weight is called, or will be; None where that is open.
    """
    found: dict[str, str] = {}
    left = {
        weight: [name for name in names if name in known] or list(names[:1])
        for weight, names in candidates.items()
    }
    while sure := {weight: names[0] for weight, names in left.items() if len(names) == 1}:
        found |= sure
        left = {
            weight: [name for name in names if name not in sure.values()]
            for weight, names in left.items()
            if weight not in sure
        }
    return None if left or len(set(found.values())) < len(found) else found


State = Mapping[str, np.ndarray]
OPTIMIZER_PREFIX = "optimizer/"
"""How the names of slots begin."""
STEPS = "steps"
"""How often a weight was updated, among the slots that are common."""


@dataclass(frozen=True)
class StateFormat:
    """Of a run's model and optimizer.

    Attributes:
        names: Of its weights.
        optimizer_state_names: Of slots; None where nobody knows them.
        optimizer: Its name in the spec.
    """

    names: NameMap
    optimizer_state_names: OptimizerStateNames | None
    optimizer: str

    def has_optimizer_state(self, slots: Collection[str]) -> bool:
        """Whether it is known how each of these is kept."""
        forms = self.optimizer_state_names
        return forms is not None and all(forms.slot(self.optimizer, "", slot) for slot in slots)

    def resolve_names(
        self, weights: Sequence[str], slots: Collection[str], known: Collection[str]
    ) -> dict[str, dict[str, str]] | None:
        """What the slots of weights are called, or will be: by weight and slot.

        Args:
            weights: By their names here.
            slots: As the spec calls them.
            known: The names of those that there are.

        Returns:
            None where a name may be that of several weights.
        """
        found: dict[str, dict[str, str]] = {weight: {} for weight in weights}
        for slot in slots:
            names = match_names(self._candidates(weights, slot), known)
            if names is None:
                return None
            for weight, name in names.items():
                found[weight][slot] = name
        return found

    def _candidates(self, weights: Sequence[str], slot: str) -> dict[str, list[str]]:
        """What one slot of each weight may be called."""
        assert self.optimizer_state_names is not None
        return {
            weight: [
                OPTIMIZER_PREFIX + name
                for name in self.optimizer_state_names.slot(self.optimizer, weight, slot)
            ]
            for weight in weights
        }

    def stored_names(
        self, weight: str, names: Mapping[str, str], known: Collection[str]
    ) -> dict[str, str]:
        """What there is of a weight's slots and of its steps: the name of each.

        Args:
            weight: By its name here.
            names: Of its slots, by how the spec calls them.
            known: The names of the state that there is.
        """
        assert self.optimizer_state_names is not None
        steps = self.optimizer_state_names.steps(self.optimizer, weight)
        all_of_it = names if steps is None else {**names, STEPS: OPTIMIZER_PREFIX + steps}
        return {slot: name for slot, name in all_of_it.items() if name in known}

    def to_common_state(
        self, state: State, weight: str, kept: Mapping[str, str], rate: float
    ) -> dict[str, np.ndarray]:
        """A weight's slots as the spec means them and in the common order of axes.

        Args:
            state: With all that is kept of them.
            weight: By its name here.
            kept: As `stored_names` gives it.
            rate: Of the next step.
        """
        return {
            slot: state[name]
            if slot == STEPS
            else self.names.to_common(weight, state[name]) * self._factor(slot, rate)
            for slot, name in kept.items()
        }

    def to_local_state(
        self, common: State, weight: str, names: Mapping[str, str], rate: float
    ) -> dict[str, np.ndarray]:
        """The same as they are kept here."""
        assert self.optimizer_state_names is not None
        found = {}
        for slot in common.keys() - {STEPS}:
            value = self.names.to_model(weight, common[slot]) / self._factor(slot, rate)
            found[names[slot]] = value
        steps = self.optimizer_state_names.steps(self.optimizer, weight)
        if steps is not None and STEPS in common:
            found[OPTIMIZER_PREFIX + steps] = common[STEPS]
        return found

    def _factor(self, slot: str, rate: float) -> float:
        """What it is to be multiplied by to be as the spec means it."""
        assert self.optimizer_state_names is not None
        factor = self.optimizer_state_names.rate_factor(self.optimizer, slot)
        return 1.0 if factor is None else factor * rate
