"""What the tests of `parity` train, and how they trace many runs in few processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from plugins.diverging_backends import DIVERGING

import isotrain
from isotrain.analysis.parity.trace import Trace
from isotrain.core.session.session import Session
from isotrain.core.spec.weight_name_map import NameMap
from isotrain.testing.consecutive_sessions import next_session

STEPS = 4
SAMPLES = 29
"""Global batches of 8, 8, 8 and 5: the fourth is uneven over two replicas."""
ADAM = {
    "name": "adam",
    "lr": 2.0**-7,
    "beta_1": 0.875,
    "beta_2": 0.96875,
    "epsilon": 2.0**-13,
}
FAULTS = {fault.name: fault for fault in DIVERGING}
NO_NAMES = NameMap({})


def data() -> tuple[np.ndarray, np.ndarray]:
    """Small pictures with a class each."""
    generator = np.random.default_rng(3)
    return generator.normal(size=(SAMPLES, 6, 6, 1)), generator.integers(3, size=SAMPLES)


def of_one_size() -> tuple[np.ndarray, np.ndarray]:
    """Four global batches of 7, for which TensorFlow traces once; one of two replicas has more of each."""
    inputs, targets = data()
    return inputs[:28], targets[:28]


def dense(dropout: float = 0.0, statistics: bool = False) -> Any:
    """A network of two layers; on request with a batch normalisation that nobody listens to."""
    import keras
    from keras import layers

    inputs = keras.Input((6, 6, 1))
    flat = layers.Flatten()(inputs)
    hidden = layers.Dense(24, activation="tanh", name="hidden")(flat)
    if dropout:
        hidden = layers.Dropout(dropout, seed=5)(hidden)  # its stream is part of the named state
    logits = layers.Dense(3, name="head")(hidden)
    outputs = {"logits": logits}
    if statistics:
        normalised = layers.BatchNormalization(center=False, scale=False, name="statistics")
        outputs["seen"] = normalised(flat)
    return keras.Model(inputs, outputs)


def convolutional() -> Any:
    """A convolutional network with batch normalisation."""
    import keras
    from keras import layers

    inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(4, 3, name="convolution")(inputs)
    x = layers.BatchNormalization(name="normalisation")(x)
    x = layers.Flatten()(keras.ops.tanh(x))
    return keras.Model(inputs, {"logits": layers.Dense(3, name="head")(x)})


def attention() -> Any:
    """A transformer's block over the rows of the pictures."""
    import keras
    from keras import layers

    inputs = keras.Input((6, 6, 1))
    x = layers.Dense(8, name="widen")(layers.Reshape((6, 6))(inputs))
    z = layers.LayerNormalization(epsilon=2.0**-10, name="norm")(x)
    x = x + layers.MultiHeadAttention(2, 4, name="attention")(z, z)
    return keras.Model(inputs, {"logits": layers.Dense(3, name="head")(layers.Flatten()(x))})


def objective(model: Any, batch: Any) -> Any:
    """Cross-entropy."""
    import keras

    inputs, targets = batch
    logits = model(inputs)["logits"]
    return keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True), logits


def spec(**changes: Any) -> dict[str, Any]:
    """A spec; the changes are fields of it."""
    return {
        "name": "parity",
        "model": dense,
        "data": data,
        "objective": objective,
        "optimizer": ADAM,
        "global_batch_size": 8,
        "epochs": 2,
        "threads": 1,
        **changes,
    }


def faulty_spec(precision: str) -> dict[str, Any]:
    """The one in which every planted fault shows."""
    return spec(
        model_args={"dropout": 0.5, "statistics": True},
        clip={"global_norm": 0.25},
        precision=precision,
        seed=3,
    )


def trace_faults(session: Session) -> dict[str, Any]:
    """The work of a launch: the run as it is, with each fault, and as it is in float32."""
    found = {"right": trace_right(session)}
    runs = {name: (name, "float64") for name in FAULTS} | {"float32": ("torch-ddp", "float32")}
    for name, (backend, precision) in runs.items():
        spec = faulty_spec(precision)
        with next_session(session, name, spec, backend=backend) as session:
            found[name] = trace_right(session)
    return found


def trace_right(session: Session) -> dict[str, Any]:
    """Traces the run as it is."""
    return Trace(STEPS, NO_NAMES)(session)


def clean(**changes: Any) -> dict[str, Any]:
    """A spec in which nothing is wrong."""
    return spec(**{"data": of_one_size, "global_batch_size": 7, **changes})


SGD = {"name": "sgd", "lr": 0.125, "momentum": 0.875}
RMSPROP = {"name": "rmsprop", "lr": 2.0**-7, "rho": 0.875, "epsilon": 2.0**-13}
CLEAN: list[tuple[int, dict[str, Any]]] = [
    (2, clean(model=attention, optimizer={**ADAM, "name": "adamw", "weight_decay": 0.0625})),
    (2, clean(gradient_accumulation_steps=2, optimizer=SGD, clip={"norm": 0.25}, seed=3)),
    (2, clean(optimizer={**ADAM, "name": "lamb"}, precision="float64", seed=2)),
    (1, clean(model=convolutional, seed=4)),
    (
        1,
        clean(
            model=convolutional, optimizer={**SGD, "nesterov": True}, precision="float64", seed=6
        ),
    ),
    (1, clean(optimizer=RMSPROP, clip={"value": 2.0**-6}, seed=7)),
    (1, clean(optimizer={"name": "adagrad", "lr": 0.125, "epsilon": 2.0**-13}, seed=8)),
]
"""Specs in which nothing is wrong, and on how many replicas they are compared with one."""


def other_precision(precision: str) -> str:
    """What the noise runs compute in."""
    return "float32" if precision == "float64" else "float64"


def references(session: Session) -> list[list[dict[str, Any]]]:
    """Traces every clean spec under torch: as it is, and in the other precision; a run's work."""
    session.close()
    return [
        [
            _traced({**fields, **change}, "torch-ddp", 1)
            for change in ({}, {"precision": other_precision(fields.get("precision", "float32"))})
        ]
        for _, fields in CLEAN
    ]


def others(session: Session) -> list[list[dict[str, Any]]]:
    """Traces every clean spec under TensorFlow; a run's work."""
    session.close()
    return [
        [_traced({**fields, "threads": 2 // replicas}, "tf-mirrored", replicas)]
        for replicas, fields in CLEAN
    ]  # two threads in all, which can be set only once


def _traced(fields: dict[str, Any], backend: str, replicas: int) -> dict[str, Any]:
    """One traced run."""
    with isotrain.open_session(fields, backend=backend, replicas=replicas) as session:
        session.run_directory = Path(tempfile.mkdtemp())
        return trace_right(session)
