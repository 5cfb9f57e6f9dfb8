"""How one framework calls and keeps the state of a native model, beside how all do in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from isotrain.core.contracts.slot_forms import SlotForms
from isotrain.core.spec.name_maps import NameMap

State = Mapping[str, np.ndarray]
SLOTS = "optimizer/"
"""How the names of slots begin."""
STEPS = "steps"
"""How often a weight was updated, among the slots that are common."""


@dataclass(frozen=True)
class Dialect:
    """Of a run's model and optimizer.

    Attributes:
        names: Of its weights.
        forms: Of slots; None where nobody knows them.
        optimizer: Its name in the spec.
    """

    names: NameMap
    forms: SlotForms | None
    optimizer: str

    def has_slots(self, slots: Collection[str]) -> bool:
        """Whether it is known how each of these is kept."""
        forms = self.forms
        return forms is not None and all(forms.slot(self.optimizer, "", slot) for slot in slots)

    def common_slots(
        self, state: State, weight: str, slots: Collection[str], rate: float
    ) -> dict[str, np.ndarray]:
        """What there is of a weight's slots, as the spec means them and in the common order of axes."""
        assert self.forms is not None
        found = {}
        for slot in slots:
            name = self._name(weight, slot, state)
            if name in state:
                factor = self._factor(slot, rate)
                found[slot] = self.names.to_common(weight, state[name]) * factor
        steps = self.forms.steps(self.optimizer, weight)
        if steps is not None and SLOTS + steps in state:
            found[STEPS] = state[SLOTS + steps]
        return found

    def own_slots(
        self, common: State, weight: str, known: Collection[str], rate: float
    ) -> dict[str, np.ndarray]:
        """The same as they are kept here; `known` are names of slots that are there already."""
        assert self.forms is not None
        found = {}
        for slot in common.keys() - {STEPS}:
            value = self.names.to_own(weight, common[slot]) / self._factor(slot, rate)
            found[self._name(weight, slot, known)] = value
        steps = self.forms.steps(self.optimizer, weight)
        if steps is not None and STEPS in common:
            found[SLOTS + steps] = common[STEPS]
        return found

    def _name(self, weight: str, slot: str, known: Collection[str]) -> str:
        """What a slot is called, or will be."""
        assert self.forms is not None
        names = [SLOTS + name for name in self.forms.slot(self.optimizer, weight, slot)]
        return next((name for name in names if name in known), names[0])

    def _factor(self, slot: str, rate: float) -> float:
        """What it is to be multiplied by to be as the spec means it."""
        assert self.forms is not None
        factor = self.forms.rate_factor(self.optimizer, slot)
        return 1.0 if factor is None else factor * rate
