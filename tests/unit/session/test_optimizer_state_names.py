"""Whose a slot of an optimizer is, where names of weights are much alike."""

from __future__ import annotations

import numpy as np
import pytest

from isotrain.adapters.tensorflow.optimizer_state_names import KerasOptimizerStateNames
from isotrain.core.session.weights.state_format import StateFormat
from isotrain.core.spec.weight_name_map import NameMap

KERAS = StateFormat(NameMap({}), KerasOptimizerStateNames(), "sgd")
APART = {
    "variables of TensorFlow": {"w": "w_0_momentum", "w_0": "w_0_0_momentum"},
    "variables of Keras": {"w": "w_momentum", "w_0": "w_0_momentum", "w_0_0": "w_0_0_momentum"},
    "both": {"w": "w_momentum", "w_0": "w_0_0_momentum"},
    "of one path": {"w": "w_momentum", "w#1": "w_momentum#1"},
}
"""The slots of weights, by how these are called and kept."""
ALIKE = {
    "flattened": (["a/b_c", "a_b/c"], ["a_b_c_momentum", "a_b_c_momentum#1"]),
    "by the number": (["w", "w_0"], ["w_0_momentum", "w_0_momentum#1"]),
    "another's": (["w"], ["w_momentum", "w_0_momentum"]),
}
"""Weights whose slots' names do not tell whose they are, and these names."""


@pytest.mark.parametrize("name", APART)
def test_each_weight_gets_its_own_slots(name: str) -> None:
    own = {weight: f"optimizer/sgd/{slot}" for weight, slot in APART[name].items()}
    state = {slot: np.array(float(place)) for place, slot in enumerate(own.values())}
    names = KERAS.resolve_names(list(own), ["momentum"], state)
    assert names == {weight: {"momentum": slot} for weight, slot in own.items()}
    for place, weight in enumerate(own):
        kept = KERAS.stored_names(weight, names[weight], state)
        found = KERAS.to_common_state(state, weight, kept, 0.5)
        assert float(found["momentum"]) == place
        assert KERAS.to_local_state(found, weight, names[weight], 0.5) == {own[weight]: place}


@pytest.mark.parametrize("name", ALIKE)
def test_ambiguous_slots_are_not_assigned(name: str) -> None:
    weights, slots = ALIKE[name]
    known = [f"optimizer/sgd/{slot}" for slot in slots]
    assert KERAS.resolve_names(weights, ["momentum"], known) is None


def test_names_of_missing_slots_are_distinct() -> None:
    assert KERAS.resolve_names(["v", "w"], ["momentum"], []) == {
        weight: {"momentum": f"optimizer/sgd/{weight}_0_momentum"} for weight in ("v", "w")
    }
    assert KERAS.resolve_names(["a/b_c", "a_b/c"], ["momentum"], []) is None
