"""What strategies train in the checks: a small network on handwritten digits, here and in NumPy."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.data.dataset import DataSet
from isotrain.core.errors import IsotrainError
from isotrain.testing import reference_model
from isotrain.testing.native_kit_models import kit_model_fields

TRAIN = 797
"""Images to train on: the last global batch of an epoch is a partial one."""
GLOBAL_BATCH = 64
EPOCHS = 5
"""Of 13 steps: hardly any strategy's last exchange falls on the last one by itself."""
RATE = 0.375
HIDDEN = 16

Weights = Mapping[str, np.ndarray]


def build_model() -> Any:
    """The portable model: 64 pixels, one hidden layer, 10 logits."""
    import keras
    from keras import layers

    pixels = keras.Input((64,))
    hidden = layers.Dense(HIDDEN, activation="tanh", name="hidden")(pixels)
    return keras.Model(pixels, layers.Dense(10, name="head")(hidden))


@functools.cache
def images() -> tuple[np.ndarray, np.ndarray]:
    """The digits of scikit-learn, float64 from 0 to 1, and their labels.

    From the file that its `load_digits` reads, which to import would take every process a second.

    Raises:
        IsotrainError: scikit-learn is not installed.
    """
    table = np.loadtxt(_package() / "datasets/data/digits.csv.gz", delimiter=",")
    return table[:, :-1] / 16, table[:, -1].astype(np.int64)


def data(count: int = TRAIN) -> DataSet:
    """Every second image is held out: each writer is in both parts."""
    inputs, labels = images()
    train = slice(1, 2 * count, 2)
    return DataSet((inputs[train], labels[train]), (inputs[::2], labels[::2]))


def spec(count: int = TRAIN, *, adapter: Adapter | None = None, **changes: Any) -> dict[str, Any]:
    """The spec of a run on the first `count` images, for a backend."""
    return {
        "name": "conformance",
        "model": build_model,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "metrics": ["accuracy"],
        "data": data,
        "data_args": {"count": count},
        "optimizer": {"name": "sgd", "lr": RATE},
        "global_batch_size": GLOBAL_BATCH,
        "epochs": EPOCHS,
        "seed": reference_model.SEED,
        "precision": "float64",
        "threads": 1,  # there is nothing to share out in a model this small
        "timeouts": {"progress": 60.0},
        **kit_model_fields(adapter, model="digits_model"),
        **changes,
    }


def require() -> None:
    """Makes sure that the images are there.

    Raises:
        IsotrainError: scikit-learn, with which they come, is not installed.
    """
    _package()


def _package() -> Path:
    """The folder of scikit-learn."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise IsotrainError(
            "the checks of strategies train on the digits of scikit-learn, which is not installed:"
            " pip install 'isotrain[testing]'."
        )
    return Path(found.origin).parent


class Oracle:
    """The same training in NumPy, on whole global batches.

    Attributes:
        weights: By canonical name.
    """

    def __init__(self, weights: Weights, count: int = TRAIN) -> None:
        self.weights = {name: np.array(value) for name, value in weights.items()}
        self._data = data(count)

    def loss(self, rows: np.ndarray) -> float:
        """The mean loss over training images."""
        inputs, labels = (part[rows] for part in self._data.train)
        probabilities = self._probabilities(self._hidden(inputs))
        return float(-np.log(probabilities[np.arange(len(rows)), labels]).mean())

    def gradients(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The gradient of that loss."""
        inputs, labels = (part[rows] for part in self._data.train)
        hidden = self._hidden(inputs)
        outer = self._probabilities(hidden)
        outer[np.arange(len(rows)), labels] -= 1
        outer /= len(rows)
        inner = (outer @ self.weights["head/kernel"].T) * (1 - hidden**2)
        return {
            "hidden/kernel": inputs.T @ inner,
            "hidden/bias": inner.sum(axis=0),
            "head/kernel": hidden.T @ outer,
            "head/bias": outer.sum(axis=0),
        }

    def step(self, rows: np.ndarray) -> None:
        """Plain gradient descent."""
        for name, gradient in self.gradients(rows).items():
            self.weights[name] = self.weights[name] - RATE * gradient

    def accuracy(self) -> float:
        """The share of held-out images that are told right."""
        inputs, labels = self._data.validation
        guesses = np.argmax(self._probabilities(self._hidden(inputs)), axis=1)
        return float((guesses == labels).mean())

    def trained(self) -> Oracle:
        """This one, after all of the training."""
        for epoch in range(EPOCHS):
            for rows in reference_model.epoch_batches(epoch, GLOBAL_BATCH, TRAIN):
                self.step(rows)
        return self

    def _hidden(self, inputs: np.ndarray) -> np.ndarray:
        hidden: np.ndarray = np.tanh(
            inputs @ self.weights["hidden/kernel"] + self.weights["hidden/bias"]
        )
        return hidden

    def _probabilities(self, hidden: np.ndarray) -> np.ndarray:
        logits = hidden @ self.weights["head/kernel"] + self.weights["head/bias"]
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scaled: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
        return scaled
