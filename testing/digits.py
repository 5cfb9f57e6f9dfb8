"""Training run of the strategy checks: a small network on handwritten digits, in Keras and in NumPy."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.contracts.parallel_layout import ParallelLayout
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


def build_model(hidden_layers: int = 1) -> Any:
    """Portable Keras model: input [samples, 64], hidden layers, logits [samples, 10]."""
    import keras
    from keras import layers

    pixels = hidden = keras.Input((64,))
    for name in _hidden_names(hidden_layers):
        hidden = layers.Dense(HIDDEN, activation="tanh", name=name)(hidden)
    return keras.Model(pixels, layers.Dense(10, name="head")(hidden))


def _hidden_names(count: int) -> list[str]:
    """Names of the hidden layers: `hidden`, `hidden_2`, `hidden_3` and so on."""
    return ["hidden", *(f"hidden_{number}" for number in range(2, count + 1))][:count]


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


def staged_fields(parallel_layout: ParallelLayout, replicas: int) -> dict[str, Any]:
    """Spec fields for a layout with pipeline stages: a layer for each, and micro-batches for each process.

    They are empty for any other layout.
    """
    mesh = parallel_layout.device_mesh(replicas)
    if STAGE not in mesh.sizes:
        return {}
    stages, processes = mesh.size(STAGE), max(mesh.stage_processes, default=1)
    deeper = {"model_args": {"hidden_layers": stages - 1}} if stages > 2 else {}
    return {**deeper, "gradient_accumulation_steps": 2 * stages * processes}


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
        kernels = [name for name in weights if name.endswith("/kernel")]
        self._layers = _hidden_names(len(kernels) - 1)
        self._data = data(count)

    def loss(self, rows: np.ndarray) -> float:
        """Mean loss over training images, a scalar."""
        inputs, labels = (part[rows] for part in self._data.train)
        probabilities = self._probabilities(self._activations(inputs)[-1])
        return float(-np.log(probabilities[np.arange(len(rows)), labels]).mean())

    def gradients(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Gradients of the mean loss, by name, in the shapes of the weights."""
        inputs, labels = (part[rows] for part in self._data.train)
        activations = self._activations(inputs)
        gradient = self._probabilities(activations[-1])
        gradient[np.arange(len(rows)), labels] -= 1
        gradient /= len(rows)
        gradients = {}
        for layer in ("head", *reversed(self._layers)):
            given = activations.pop()
            gradients[f"{layer}/kernel"] = given.T @ gradient
            gradients[f"{layer}/bias"] = gradient.sum(axis=0)
            gradient = (gradient @ self.weights[f"{layer}/kernel"].T) * (1 - given**2)
        return gradients

    def step(self, rows: np.ndarray) -> None:
        """Takes one step of plain SGD on the samples at these indices, shape `[batch]`."""
        for name, gradient in self.gradients(rows).items():
            self.weights[name] = self.weights[name] - RATE * gradient

    def accuracy(self) -> float:
        """Accuracy on the held-out images, a scalar from 0 to 1."""
        inputs, labels = self._data.validation
        predicted = np.argmax(self._probabilities(self._activations(inputs)[-1]), axis=1)
        return float((predicted == labels).mean())

    def trained(self) -> Oracle:
        """Trains for all epochs, in place; returns itself."""
        for epoch in range(EPOCHS):
            for rows in reference_model.epoch_batches(epoch, GLOBAL_BATCH, TRAIN):
                self.step(rows)
        return self

    def _activations(self, inputs: np.ndarray) -> list[np.ndarray]:
        """Inputs `[batch, features]`, and the activations of each hidden layer, `[batch, units]`."""
        activations = [inputs]
        for name in self._layers:
            kernel, bias = self.weights[f"{name}/kernel"], self.weights[f"{name}/bias"]
            activations.append(np.tanh(activations[-1] @ kernel + bias))
        return activations

    def _probabilities(self, hidden: np.ndarray) -> np.ndarray:
        """Softmax probabilities, shape `[batch, classes]`."""
        logits = hidden @ self.weights["head/kernel"] + self.weights["head/bias"]
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        softmax: np.ndarray = exponentials / exponentials.sum(axis=1, keepdims=True)
        return softmax
