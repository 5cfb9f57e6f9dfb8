"""Every optimizer, schedule, kind of clipping and precision once."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

_ADAM = {"beta_1": 0.875, "beta_2": 0.96875, "epsilon": 2.0**-13}
_WARM = {"warmup_steps": 2, "warmup_from_fraction": 0.25}


def build_model() -> Any:
    """A small network with a regularised layer."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(
                8,
                activation="tanh",
                kernel_regularizer=keras.regularizers.L2(2.0**-6),
                name="hidden",
            ),
            layers.Dense(4, name="head"),
        ]
    )


def data() -> Any:
    """Samples of six numbers in four classes: three global batches, and one more to evaluate on.

    None is cut short: frameworks trace and compile anew for each size.
    """
    generator = np.random.default_rng(23)
    features = generator.normal(size=(32, 6))
    classes = np.argmax(features @ generator.normal(size=(6, 4)), axis=1)
    return isotrain.DataSet((features[:24], classes[:24]), (features[24:], classes[24:]))


BASE: dict[str, Any] = {
    "model": build_model,
    "data": data,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "metrics": ["accuracy"],
    "optimizer": {"name": "sgd", "lr": 0.125},
    "global_batch_size": 8,
    "steps": 6,
    "precision": "float64",
    "threads": 1,
}

FLOAT64: dict[str, dict[str, Any]] = {
    "sgd-nesterov": {
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.875, "nesterov": True}
    },
    "sgd-decay": {"optimizer": {"name": "sgd", "lr": 0.125, "weight_decay": 0.0625}},
    "adam-amsgrad": {"optimizer": {"name": "adam", "lr": 2.0**-6, "amsgrad": True, **_ADAM}},
    "adamw": {"optimizer": {"name": "adamw", "lr": 2.0**-6, "weight_decay": 0.0625, **_ADAM}},
    "rmsprop": {
        "optimizer": {
            "name": "rmsprop",
            "lr": 2.0**-6,
            "rho": 0.875,
            "momentum": 0.5,
            "epsilon": 2.0**-10,
            "centered": True,
        }
    },
    "adagrad": {
        "optimizer": {
            "name": "adagrad",
            "lr": 0.125,
            "initial_accumulator_value": 0.125,
            "epsilon": 2.0**-13,
        }
    },
    "lamb": {"optimizer": {"name": "lamb", "lr": 2.0**-6, **_ADAM}},
    "muon": {"optimizer": {"name": "muon", "lr": 2.0**-6, "momentum": 0.75, **_ADAM}},
    "nadam": {"optimizer": {"name": "nadam", "lr": 2.0**-6, **_ADAM}},
    "radam": {"optimizer": {"name": "radam", "lr": 2.0**-6, **_ADAM, "beta_2": 0.75}},
    "warm-up": {"schedule": {"name": "constant", **_WARM}},
    "step": {"schedule": {"name": "step", "every_steps": 2, "factor": 0.5}},
    "cosine": {"schedule": {"name": "cosine", "final_fraction": 0.125, **_WARM}},
    "polynomial": {"schedule": {"name": "polynomial", "power": 2.0, "warmup_epochs": 1}},
    "linear": {"schedule": {"name": "linear", "final_fraction": 0.125}},
    "exponential": {"schedule": {"name": "exponential", "every_steps": 2, "factor": 0.25}},
    "milestones": {"schedule": {"name": "milestones", "at_steps": [1, 2], "factor": 0.5}},
    "cosine-restarts": {"schedule": {"name": "cosine-restarts", "first_steps": 2}},
    "inverse-sqrt": {"schedule": {"name": "inverse-sqrt", "timescale_steps": 2}},
    "wsd": {"schedule": {"name": "wsd", "decay_steps": 2, "shape": "1-sqrt"}},
    "one-cycle": {"schedule": {"name": "one-cycle", "rise_fraction": 0.5}},
    "one-cycle-momentum": {
        "schedule": {"name": "one-cycle", "momentum_range": [0.25, 0.75]},
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
    },
    "one-cycle-beta": {
        "schedule": {"name": "one-cycle", "momentum_range": [0.25, 0.75]},
        "optimizer": {"name": "adam", "lr": 2.0**-6, **_ADAM},
    },
    "function": {"schedule": lambda step: 1 / (2 + step)},
    "scaling-linear": {"scaling": {"rule": "linear", "base_batch_size": 16}},
    "scaling-sqrt": {"scaling": {"rule": "sqrt", "base_batch_size": 16}},
    "clip-value": {"clip": {"value": 0.0625}},
    "clip-norm": {"clip": {"norm": 0.125}},
    "clip-global-norm": {"clip": {"global_norm": 0.125}},
    "gradient_accumulation_steps": {
        "gradient_accumulation_steps": 3,
        "clip": {"global_norm": 0.25},
    },
    "other-seed": {"seed": 1},
    "no-shuffle": {"shuffle": False, "global_batch_size": 7, "drop_remainder": True},
}
"""What is changed of the base, in float64."""

ROUGH: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16", "loss_scale": {"initial": 1024.0, "growth_steps": 2}},
    "float16-clipped": {"precision": "float16", "clip": {"global_norm": 0.125}},
}
"""The other precisions."""


SPECS = {name: {**BASE, **changes} for name, changes in {**FLOAT64, **ROUGH}.items()}
"""All of them."""
EVALUATED = {next(iter(SPECS)), *ROUGH}
"""Those whose model is evaluated too: of the choices, it knows the precision alone."""


def train(session: isotrain.Session, name: str) -> dict[str, np.ndarray]:
    """Trains one spec; everything worth comparing, by name."""
    found = {f"start/{n}": v for n, v in session.read_state(("trainable",)).items()}
    losses = [float(session.step(batch)) for batch in session.batches()]
    found |= {f"weight/{n}": v for n, v in session.read_state(("trainable",)).items()}
    found["loss"] = np.array(losses)
    found["rate"] = np.array([session.learning_rate(step) for step in range(len(losses))])
    found["accuracy"] = np.array(session.metrics()["accuracy"])
    evaluated = session.evaluate() if name in EVALUATED else {}
    return found | {f"evaluated/{n}": np.array(v) for n, v in evaluated.items()}
