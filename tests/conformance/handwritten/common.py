"""What the hand-written loops share: their job, and the order of the samples. isotrain is not imported.

A job is a JSON file with: `optimizer` (name and hyperparameters), `model` (the name of a portable one),
`drop_remainder`, `start` and `result` (npz files with the weights by name), `replicas`, `threads` of each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from conformance import cases

RANK = int(os.environ.get("RANK", "0"))
JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
REPLICAS = int(JOB["replicas"])
Tree = Any


def start_weights() -> dict[str, np.ndarray]:
    """The weights to start from."""
    with np.load(JOB["start"]) as archive:
        return dict(archive)


def save(weights: dict[str, np.ndarray]) -> None:
    """Leaves the final weights behind; rank 0 does."""
    if RANK == 0:
        np.savez(JOB["result"], **weights)  # type: ignore[arg-type]


def global_batches() -> Iterator[np.ndarray]:
    """The samples of each step."""
    for epoch in range(cases.EPOCHS):
        sequence = np.random.SeedSequence(cases.SEED, spawn_key=(epoch,))
        order = np.random.Generator(np.random.PCG64(sequence)).permutation(cases.SAMPLES)
        for start in range(0, cases.SAMPLES, cases.GLOBAL_BATCH):
            rows = order[start : start + cases.GLOBAL_BATCH]
            if len(rows) == cases.GLOBAL_BATCH or not JOB["drop_remainder"]:
                yield rows


def local_batch(rows: np.ndarray, replica: int) -> tuple[np.ndarray, float]:
    """The samples of one replica, and the weight that makes the mean over replicas one over samples.

    A replica without samples takes any one, and it weighs nothing.
    """
    own = np.array_split(rows, REPLICAS)[replica]
    if len(own) == 0:
        return rows[:1], 0.0
    return own, len(own) * REPLICAS / len(rows)


def gather(tree: Tree, rows: np.ndarray) -> Tree:
    """The samples `rows` of an array, or of every array of a dict."""
    if isinstance(tree, dict):
        return {name: array[rows] for name, array in tree.items()}
    return tree[rows]


def keras_model() -> Any:
    """The portable model that the job names."""
    return getattr(cases, JOB["model"])()


def load_keras(model: Any) -> None:
    """Gives a Keras model the weights to start from."""
    start = start_weights()
    for variable in model.variables:
        variable.assign(start[variable.path])


def keras_weights(model: Any) -> dict[str, np.ndarray]:
    """A Keras model's weights by name."""
    import keras

    return {v.path: keras.ops.convert_to_numpy(v) for v in model.variables}


def keras_optimizer() -> Any:
    """The Keras optimizer that the job names."""
    import keras

    settings = dict(JOB["optimizer"])
    kind = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[settings.pop("name")]
    return kind(learning_rate=settings.pop("lr"), **settings)


def torch_optimizer(parameters: Any) -> Any:
    """The torch optimizer that the job names."""
    import torch

    settings = dict(JOB["optimizer"])
    if settings.pop("name") == "sgd":
        return torch.optim.SGD(parameters, **settings)
    betas = (settings.pop("beta_1"), settings.pop("beta_2"))
    return torch.optim.Adam(parameters, eps=settings.pop("epsilon"), betas=betas, **settings)
