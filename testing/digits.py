"""Training run of the strategy checks: a small network on handwritten digits, in Keras and in NumPy."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.data.dataset import DataSet
from isotrain.core.errors import IsotrainError
from isotrain.testing import reference_model
from isotrain.testing.native_kit_models import kit_model_fields

TRAIN = 797
"""Number of training images; the last global batch of an epoch is partial."""
GLOBAL_BATCH = 64
EPOCHS = 5
"""Number of epochs, of 13 steps each: a strategy's period rarely ends on the last step by chance."""
RATE = 0.375
HIDDEN = 16

Weights = Mapping[str, np.ndarray]


def build_model() -> Any:
    """Portable Keras model: input [samples, 64], one hidden layer, logits [samples, 10]."""
    import keras
    from keras import layers

    pixels = keras.Input((64,))
    hidden = layers.Dense(HIDDEN, activation="tanh", name="hidden")(pixels)
    return keras.Model(pixels, layers.Dense(10, name="head")(hidden))


@functools.cache
def images() -> tuple[np.ndarray, np.ndarray]:
    """Digits of scikit-learn: images [1797, 64], float64 from 0 to 1; labels [1797], int64.

    Read from the file that `load_digits` reads: importing scikit-learn would cost every process a second.

    Raises:
        IsotrainError: scikit-learn is not installed.
    """
    table = np.loadtxt(_package() / "datasets/data/digits.csv.gz", delimiter=",")
    return table[:, :-1] / 16, table[:, -1].astype(np.int64)


def data(count: int = TRAIN) -> DataSet:
    """Data set of `count` training images; every second image is held out, so both parts have each writer."""
    inputs, labels = images()
    train = slice(1, 2 * count, 2)
    return DataSet((inputs[train], labels[train]), (inputs[::2], labels[::2]))


def spec(count: int = TRAIN, *, adapter: Adapter | None = None, **changes: Any) -> dict[str, Any]:
    """Spec of a run on the first `count` images, for a backend, with `changes` to its fields."""
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
    """Checks that the images are installed.

    Raises:
        IsotrainError: scikit-learn, which includes them, is not installed.
    """
    _package()


def _package() -> Path:
    """Folder of scikit-learn."""
    module_spec = importlib.util.find_spec("sklearn")
    if module_spec is None or module_spec.origin is None:
        raise IsotrainError(
            "the checks of strategies train on the digits of scikit-learn, which is not installed:"
            " pip install 'isotrain[testing]'."
        )
    return Path(module_spec.origin).parent


class Oracle:
    """The same training in NumPy, on whole global batches, in float64.

    `rows` are indices of training images, shape [samples].

    Attributes:
        weights: Weights by canonical name.
    """

    def __init__(self, weights: Weights, count: int = TRAIN) -> None:
        self.weights = {name: np.array(value) for name, value in weights.items()}
        self._data = data(count)

    def loss(self, rows: np.ndarray) -> float:
        """Mean loss over training images, a scalar."""
        inputs, labels = (part[rows] for part in self._data.train)
        probabilities = self._probabilities(self._hidden(inputs))
        return float(-np.log(probabilities[np.arange(len(rows)), labels]).mean())

    def gradients(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Gradients of the mean loss, by name, in the shapes of the weights."""
        inputs, labels = (part[rows] for part in self._data.train)
        hidden = self._hidden(inputs)
        logits_grad = self._probabilities(hidden)
        logits_grad[np.arange(len(rows)), labels] -= 1
        logits_grad /= len(rows)
        hidden_grad = (logits_grad @ self.weights["head/kernel"].T) * (1 - hidden**2)
        return {
            "hidden/kernel": inputs.T @ hidden_grad,
            "hidden/bias": hidden_grad.sum(axis=0),
            "head/kernel": hidden.T @ logits_grad,
            "head/bias": logits_grad.sum(axis=0),
        }

    def step(self, rows: np.ndarray) -> None:
        """Takes one step of plain SGD on the samples at these indices, shape `[batch]`."""
        for name, gradient in self.gradients(rows).items():
            self.weights[name] = self.weights[name] - RATE * gradient

    def accuracy(self) -> float:
        """Accuracy on the held-out images, a scalar from 0 to 1."""
        inputs, labels = self._data.validation
        predicted = np.argmax(self._probabilities(self._hidden(inputs)), axis=1)
        return float((predicted == labels).mean())

    def trained(self) -> Oracle:
        """Trains for all epochs, in place; returns itself."""
        for epoch in range(EPOCHS):
            for rows in reference_model.epoch_batches(epoch, GLOBAL_BATCH, TRAIN):
                self.step(rows)
        return self

    def _hidden(self, inputs: np.ndarray) -> np.ndarray:
        """Activations of the hidden layer for inputs `[batch, features]`, shape `[batch, units]`."""
        hidden: np.ndarray = np.tanh(
            inputs @ self.weights["hidden/kernel"] + self.weights["hidden/bias"]
        )
        return hidden

    def _probabilities(self, hidden: np.ndarray) -> np.ndarray:
        """Softmax probabilities, shape `[batch, classes]`."""
        logits = hidden @ self.weights["head/kernel"] + self.weights["head/bias"]
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        softmax: np.ndarray = exponentials / exponentials.sum(axis=1, keepdims=True)
        return softmax
