"""Small specs of sessions, and how the tests launch them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import isotrain
from isotrain.core.contracts.process import from_variables
from isotrain.testing import digits
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network


def samples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    return generator.standard_normal((12, 3)), generator.standard_normal((12, 1))


def network() -> Network:
    return Network([Dense(3, 5, "tanh", name="first"), Dense(5, 1, name="last")])


def net(frozen: bool = False) -> Any:
    import keras

    first = keras.layers.Dense(5, activation="tanh", name="first")
    model = keras.Sequential([keras.Input((3,)), first, keras.layers.Dense(1, name="last")])
    first.trainable = not frozen
    return model


MODELS = {"numpy": network, "torch": net, "tensorflow": net}


def spec(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODELS,
        "data": samples,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.0625},
        "global_batch_size": 4,
        "epochs": 3,
        "threads": 1,
        **fields,
    }


def digits_for_one(count: int) -> Any:
    """The digits of the kit, which a run with two processes cannot load."""
    context = from_variables(os.environ)
    if context is not None and context.world_size == 2:
        raise RuntimeError("two are too many")
    return digits.data(count)


def launch(
    work: Any, folder: Path, replicas: int = 1, backend: str = "reference", **fields: Any
) -> Any:
    return isotrain.launch(
        work,
        spec(**fields),
        backend=backend,
        replicas=replicas,
        output=folder / "run",
        on_event=lambda event: None,
    )[0]
