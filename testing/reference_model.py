"""Reference model of the backend checks: a portable Keras model, and the same model in NumPy as the oracle.

The prediction is a network of two dense layers. Three more outputs show what a backend does, without
changing the prediction: `seen`, one weight per sample, whose gradient shows which samples counted and with
which weight; `noisy`, whose gradient is the dropout mask of a replica where the input `noise` is 1 (it is 0
in training); and `statistics`, a batch normalization whose output is not used.

All arrays are float64 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.step_context import StepContext
from isotrain.core.data.dataset import DataSet
from isotrain.testing.native_kit_models import kit_model_fields

SAMPLES = 22
GLOBAL_BATCH = 7
"""Global batches of 7, 7, 7 and 1: uneven over 2 and 3 replicas, and the last leaves replicas empty."""
EPOCHS = 2
SEED = 5
RATE = 0.125
MOMENTUM = 0.5
STATISTICS_MOMENTUM = 0.75
STATISTICS_EPSILON = 1e-3
"""Keras' default."""
NOISE = 64

START = {
    "hidden/kernel": (-0.6877258477999194, -0.18997467317135908),
    "hidden/bias": (0.0, 0.0),
    "noisy/kernel": (-0.2456840297502269, 0.23689653674500266),
    "head/kernel": (0.12588257195027652, 0.6316482344695284),
    "head/bias": (0.0, 0.0),
    "seen/embeddings": (-0.0015920311071654508, -0.029448761916009626),
}
"""First two initial values of each weight, for this model and `SEED`."""

UPDATES = (("head", "seen"), ("hidden", "noisy"))
"""Layers of each of two named updates; the second is due in every second step."""

Inputs = dict[str, np.ndarray]
State = dict[str, np.ndarray]


def build_model() -> Any:
    """Portable Keras model: inputs `features`, `index` and `noise`, four outputs."""
    import keras
    from keras import layers

    features = keras.Input((4,), name="features")
    index = keras.Input((), dtype="int32", name="index")
    noise = keras.Input((NOISE,), name="noise")
    hidden = layers.Dense(5, activation="tanh", name="hidden")(features)
    outputs = {
        "prediction": layers.Dense(3, name="head")(hidden),
        "seen": layers.Embedding(SAMPLES, 1, name="seen")(index),
        "noisy": layers.Dense(1, use_bias=False, name="noisy")(layers.Dropout(0.5)(noise)),
        "statistics": layers.BatchNormalization(
            momentum=STATISTICS_MOMENTUM, center=False, scale=False, name="statistics"
        )(features),
    }
    return keras.Model({"features": features, "index": index, "noise": noise}, outputs)


def objective(model: Any, batch: Any) -> Any:
    """Losses, shape [samples], and the predictions for the metrics, shape [samples, 3]."""
    from keras import ops

    inputs, targets = batch
    outputs = {name: ops.cast(value, targets.dtype) for name, value in model(inputs).items()}
    losses = ops.mean(ops.square(outputs["prediction"] - targets), axis=-1)
    return losses + outputs["seen"][:, 0] + outputs["noisy"][:, 0], outputs["prediction"]


def step_objective(model: Any, batch: Any, step: StepContext) -> Any:
    """Losses of `objective`, and three times the squared norm of the mean prediction, by each collective.

    Each is multiplied by the value `spread`. Rows that `all_gather` misplaces add to the loss.
    """
    from keras import ops

    losses, predictions = objective(model, batch)
    rows, first = step.all_gather(predictions)
    local_rows = ops.take(rows, first + ops.arange(ops.shape(predictions)[0]), axis=0)
    misplaced = ops.sum(ops.square(local_rows - predictions), axis=-1)
    count = ops.cast(ops.shape(rows)[0], predictions.dtype)
    mean_by_sum = step.sum(ops.sum(predictions, axis=0)) / count
    mean = step.mean(ops.mean(predictions, axis=0))
    spread = (
        ops.sum(predictions * ops.mean(rows, axis=0), axis=-1)
        + ops.sum(ops.square(mean_by_sum))
        + ops.sum(ops.square(mean))
    )
    return {
        "fit": losses,
        "spread": step.values["spread"] * spread + 1000 * misplaced,
    }, predictions


def same_sign(targets: Any, predictions: Any) -> Any:
    """Custom metric on tensors of any framework, shapes [samples, 3]: fraction of equal signs, [samples]."""
    products = targets * predictions
    correct = (products / abs(products) + 1) / 2
    return (correct[:, 0] + correct[:, 1] + correct[:, 2]) / 3


def samples(count: int = SAMPLES, noise: float = 0.0) -> tuple[Inputs, np.ndarray]:
    """Inputs and targets of the first `count` samples.

    Returns:
        Inputs `features` [count, 4], `index` [count] (int), `noise` [count, NOISE]; targets [count, 3].
    """
    generator = np.random.default_rng(11)
    features = generator.normal(size=(SAMPLES, 4))
    targets = np.sin(features @ generator.normal(size=(4, 3)))
    inputs = {
        "features": features[:count],
        "index": np.arange(count),
        "noise": np.full((count, NOISE), noise),
    }
    return inputs, targets[:count]


def data() -> DataSet:
    """Data set: all samples for training, the first 13 for validation."""
    return DataSet(samples(), samples(13))


def spec(adapter: Adapter | None = None, **changes: Any) -> dict[str, Any]:
    """Spec of the run in which a backend is checked, with `changes` to its fields."""
    return {
        "name": "conformance",
        "model": build_model,
        "objective": objective,
        "data": data,
        "metrics": ["mean_absolute_error", same_sign],
        "optimizer": {"name": "sgd", "lr": RATE, "momentum": MOMENTUM},
        "global_batch_size": GLOBAL_BATCH,
        "epochs": EPOCHS,
        "seed": SEED,
        "precision": "float64",
        "timeouts": {"progress": 100.0},
        **kit_model_fields(adapter, model="probe_model", objective="probe_objective"),
        **changes,
    }


def spec_with_step(adapter: Adapter) -> dict[str, Any]:
    """Spec of the run whose objective takes a step."""
    native = kit_model_fields(adapter, objective="probe_step_objective")
    fields = {"objective": step_objective, "values": {"spread": 1.0}, **native}
    return spec(adapter, **fields)


def spec_with_groups(adapter: Adapter) -> dict[str, Any]:
    """Spec of the run in which biases have half the rate, and the kernel of the head another momentum."""
    groups = [
        {"weights": "*bias", "lr_factor": 0.5},
        {"weights": "head/kernel", "momentum": 0.25},
    ]
    optimizer = {"name": "sgd", "lr": RATE, "momentum": MOMENTUM, "groups": groups}
    return spec(adapter, optimizer=optimizer)


def spec_with_per_replica_state(adapter: Adapter) -> dict[str, Any]:
    """Spec of the run in which each replica keeps its moving statistics for itself."""
    return spec(adapter, per_replica="statistics/*")


def spec_with_sample_draws(adapter: Adapter) -> dict[str, Any]:
    """Spec of the run whose random layers draw by sample."""
    return spec(adapter, random_layers="per-sample")


def spec_with_ordered_sums(adapter: Adapter) -> dict[str, Any]:
    """Spec of the run whose sums are taken in one order; some backends refuse its dropout otherwise."""
    changes = {"random_layers": "per-sample"} if adapter.draws_per_sample else {}
    return spec(adapter, reproducible="bits", verify_every=1, **changes)


def spec_with_updates(adapter: Adapter) -> dict[str, Any]:
    """Spec of the run with the named updates of `UPDATES`."""
    updates = {
        "_".join(layers): {"weights": [f"{layer}/*" for layer in layers], "every": every}
        for every, layers in enumerate(UPDATES, start=1)
    }
    return spec(adapter, updates=updates)


def starting_state() -> State:
    """Start weights drawn by NumPy, so that checks do not depend on the initializers."""
    generator = np.random.default_rng(3)
    shapes = {
        "hidden/kernel": (4, 5),
        "hidden/bias": (5,),
        "head/kernel": (5, 3),
        "head/bias": (3,),
        "seen/embeddings": (SAMPLES, 1),
        "noisy/kernel": (NOISE, 1),
    }
    return {name: generator.normal(size=shape) / 2 for name, shape in shapes.items()}


def epoch_batches(epoch: int, size: int = GLOBAL_BATCH, count: int = SAMPLES) -> list[np.ndarray]:
    """Sample indices of each global batch of an epoch, shapes [size].

    Computed here a second time from the documented shuffle, independent of the loader.
    """
    sequence = np.random.SeedSequence(SEED, spawn_key=(epoch,))
    permutation = np.random.Generator(np.random.PCG64(sequence)).permutation(count)
    return [permutation[start : start + size] for start in range(0, count, size)]


def all_batches() -> Iterator[np.ndarray]:
    """Sample indices of every global batch of the run, int64, shape `[batch]`."""
    for epoch in range(EPOCHS):
        yield from epoch_batches(epoch)


@dataclass
class Oracle:
    """The same model and optimizer in NumPy, on whole global batches.

    `rows` are sample indices, shape [samples].

    Attributes:
        weights: Weights by canonical name.
        velocity: Momentum of each weight, by the same names and in the same shapes.
    """

    weights: State
    velocity: State

    @classmethod
    def fresh(cls) -> Oracle:
        """Oracle with the start weights and zero velocity."""
        weights = starting_state()
        return cls(weights, {name: np.zeros_like(value) for name, value in weights.items()})

    def predictions(self, rows: np.ndarray) -> np.ndarray:
        """Predictions, shape [samples, 3]."""
        logits: np.ndarray = (
            self._hidden(rows) @ self.weights["head/kernel"] + self.weights["head/bias"]
        )
        return logits

    def outputs(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Outputs `[samples, ...]` in evaluation mode by name, before training, where every `noise` is 1."""
        normalized = samples()[0]["features"][rows] / np.sqrt(1.0 + STATISTICS_EPSILON)
        return {
            "prediction": self.predictions(rows),
            "seen": self.weights["seen/embeddings"][rows],
            "noisy": np.full((len(rows), 1), self.weights["noisy/kernel"].sum()),
            "statistics": normalized,
        }

    def _hidden(self, rows: np.ndarray) -> np.ndarray:
        """Activations of the hidden layer for the samples at `rows`, shape `[samples, units]`."""
        features = samples()[0]["features"][rows]
        hidden: np.ndarray = np.tanh(
            features @ self.weights["hidden/kernel"] + self.weights["hidden/bias"]
        )
        return hidden

    def losses(self, rows: np.ndarray) -> np.ndarray:
        """Loss per sample, shape [samples]."""
        difference = self.predictions(rows) - samples()[1][rows]
        seen: np.ndarray = self.weights["seen/embeddings"][rows, 0]
        losses: np.ndarray = np.mean(difference**2, axis=1) + seen
        return losses

    def metrics(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Metrics per sample, by name, shapes [samples]."""
        predictions, targets = self.predictions(rows), samples()[1][rows]
        return {
            "mean_absolute_error": np.mean(np.abs(predictions - targets), axis=1),
            "same_sign": np.mean(np.sign(predictions) == np.sign(targets), axis=1),
        }

    def spread(self, rows: np.ndarray) -> float:
        """Squared norm of the mean prediction."""
        return float(np.sum(self.predictions(rows).mean(axis=0) ** 2))

    def gradients(self, rows: np.ndarray, spread: float = 0.0) -> State:
        """Gradients of the mean loss, by name, in the shapes of the weights.

        Args:
            rows: Sample indices, shape [samples].
            spread: Factor of the squared norm of the mean prediction, which is added to the loss.
        """
        inputs, targets = samples()
        features, hidden = inputs["features"][rows], self._hidden(rows)
        predictions = self.predictions(rows)
        head_grad = 2 * (predictions - targets[rows]) / (3 * len(rows))
        head_grad += spread * 2 * predictions.mean(axis=0) / len(rows)
        hidden_grad = (head_grad @ self.weights["head/kernel"].T) * (1 - hidden**2)
        seen = np.zeros((SAMPLES, 1))
        seen[rows] = 1 / len(rows)
        return {
            "hidden/kernel": features.T @ hidden_grad,
            "hidden/bias": hidden_grad.sum(axis=0),
            "head/kernel": hidden.T @ head_grad,
            "head/bias": head_grad.sum(axis=0),
            "seen/embeddings": seen,
            "noisy/kernel": np.zeros((NOISE, 1)),
        }

    def update(
        self, gradients: Mapping[str, np.ndarray], rate: float = RATE, momentum: float = MOMENTUM
    ) -> None:
        """Takes one step of SGD with momentum; gradients by name, of the weights' shapes."""
        for name, gradient in gradients.items():
            self.velocity[name] = momentum * self.velocity[name] - rate * gradient
            self.weights[name] = self.weights[name] + self.velocity[name]


def moving_mean(batches: list[np.ndarray]) -> np.ndarray:
    """Moving mean of the batch normalization after these global batches, from 0; shape [4]."""
    features, mean = samples()[0]["features"], np.zeros(4)
    for rows in batches:
        batch_mean = features[rows].mean(axis=0)
        mean = STATISTICS_MOMENTUM * mean + (1 - STATISTICS_MOMENTUM) * batch_mean
    return mean
