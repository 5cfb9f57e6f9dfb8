"""`trainable` and `requires_grad` changed in a run, by its own loop: refused, and never ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.errors import SpecError
from isotrain.testing.consecutive_sessions import launched_in_turn


def portable(frozen: bool) -> Any:
    import keras

    layers = [keras.layers.Dense(4, name="backbone"), keras.layers.Dense(3, name="head")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.get_layer("backbone").trainable = not frozen
    return model


def native(frozen: bool) -> Any:
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(not frozen)
    return model


def samples() -> isotrain.DataSet:
    return isotrain.DataSet((np.random.default_rng(0).standard_normal((32, 4)), np.arange(32) % 3))


def spec(model: Any, frozen: bool) -> dict[str, Any]:
    return {
        "model": model,
        "model_args": {"frozen": frozen},
        "data": samples,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.25},
        "global_batch_size": 8,
        "epochs": 1,
    }


def changed(session: isotrain.Session, name: str) -> str:
    """What a loop is told that changes it after two steps; the model can be changed once the run is over."""
    model, number = session.group.model, 0
    try:
        for number, batch in enumerate(session.batches()):
            if number == 2 and name.startswith("native"):
                model[0].requires_grad_(name == "native, thawed")
            elif number == 2:
                layer = model.get_layer("backbone")
                layer.trainable = layer.trainable
                layer.trainable = not layer.trainable
            session.step(batch)
    except SpecError as error:
        return f"{number}: {error}"
    finally:
        session.close()
        if not name.startswith("native"):
            layer.trainable = not layer.trainable
    return "nothing"


@pytest.mark.parametrize(
    "backend", ["torch-ddp", pytest.param("tf-mirrored", marks=pytest.mark.slow)]
)
def test_unfreezing_during_training_is_refused(backend: str) -> None:
    specs = {"frozen": spec(portable, False), "thawed": spec(portable, True)}
    if backend == "torch-ddp":
        specs["native, thawed"] = spec({"torch": native}, True)
    (told,) = launched_in_turn(specs, changed, backend, 1)
    for name, text in told.items():
        assert text.startswith("2: "), name
        assert "initial_weights.freeze" in text, name
