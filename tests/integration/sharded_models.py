"""Models and data of the sharded runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from isotrain.core.data.dataset import DataSet
from isotrain.testing import reference_model

LAYERS, WIDTH = 8, 64


def native_model() -> Any:
    """Layers of one size, so that buckets and shares are easily told."""
    from torch import nn

    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def native_of_tensorflow(layers: int = LAYERS // 2) -> Any:
    """A sequence of tf.Modules of one size."""
    import tensorflow as tf

    class Layer(tf.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            drawn = tf.random.stateless_uniform((WIDTH, WIDTH), (seed, 1), -0.25, 0.25, tf.float64)
            self.kernel = tf.Variable(drawn)

        def __call__(self, inputs: Any) -> Any:
            return tf.tanh(inputs @ self.kernel)

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Layer(place) for place in range(layers)]

        def __call__(self, inputs: Any) -> Any:
            for layer in self.layers:
                inputs = layer(inputs)
            return inputs

    return Net()


IN_ORDER: Mapping[str, Any] = {
    "model_args": {"layers": 2},
    "optimizer": {"name": "sgd", "lr": 0.125},
    "metrics": [],
    "shuffle": False,
    "epochs": 1,
}


def of_tensorflow_by_hand() -> dict[str, Any]:
    """What `native_of_tensorflow` comes to on one replica, by a loop of one's own."""
    import tensorflow as tf

    model, losses = native_of_tensorflow(**IN_ORDER["model_args"]), []
    weights, rate = model.trainable_variables, IN_ORDER["optimizer"]["lr"]
    pairs = [np.split(each, range(7, len(each), 7)) for each in native_batches().train]
    for inputs, targets in zip(*pairs, strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(rate * gradient)
        losses.append(float(loss))
    return {"losses": losses, "weights": [weight.numpy() for weight in weights]}


def portable_model() -> Any:
    """A sequence of Keras layers of one size."""
    import keras

    layers = [
        keras.layers.Dense(WIDTH, activation="tanh", use_bias=False, name=f"layer{number}")
        for number in range(LAYERS)
    ]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def uneven_model() -> Any:
    """Weights with fewer rows than replicas, or a number that these do not divide."""
    from torch import nn

    ends = nn.Linear(WIDTH, 5), nn.Linear(1, WIDTH)
    return nn.Sequential(
        ends[0], nn.LayerNorm(5), nn.Sequential(nn.Tanh(), nn.Linear(5, 1)), ends[1]
    )


def unusual_model() -> Any:
    """Weights that are read past their modules, from lists, several times, and by what keeps them."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Any, weight: Any) -> Any:
            ctx.save_for_backward(inputs, weight)
            return inputs @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            inputs, weight = ctx.saved_tensors
            return gradient @ weight.T, inputs.flatten(0, 1).T @ gradient.flatten(0, 1)

    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 16, batch_first=True)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.places = nn.Embedding(4, 16, sparse=True)
            self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(16, 4))
            self.tied = nn.Linear(4, 16)
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.25)
            self.listed = [nn.Parameter(torch.eye(16)), nn.Parameter(torch.eye(16))]
            self.one, self.other = self.listed

        def forward(self, inputs: Any) -> Any:
            hidden, _ = self.lstm(inputs.reshape(-1, 4, 16))
            hidden = hidden + self.attention(hidden, hidden, hidden)[0]
            hidden = hidden + self.places(torch.arange(4))
            hidden = checkpoint(self._listed, self.norm(hidden), use_reentrant=False)
            hidden = self.drop(Product.apply(hidden, self.other))
            hidden = self.tied(torch.tanh(hidden @ self.tied.weight) + self.scaled(hidden))
            return (hidden @ self.one.data).flatten(1)

        def _listed(self, hidden: Any) -> Any:
            return torch.tanh(hidden @ self.listed[0].T)

    return Unusual()


def native_data() -> DataSet:
    """Vectors, and where they lead."""
    generator = np.random.default_rng(9)
    inputs = generator.normal(size=(22, WIDTH))
    return DataSet((inputs, np.sin(inputs)), (inputs[:5], np.sin(inputs[:5])))


def full_batches() -> DataSet:
    """The conformance kit's, of which all global batches have one size, for which TensorFlow traces once."""
    return DataSet(reference_model.samples(21), reference_model.samples(13))


def native_batches() -> DataSet:
    """The data of `native_data` in full global batches, for which TensorFlow traces once."""
    (inputs, targets), evaluated = native_data().train, native_data().validation
    return DataSet((inputs[:21], targets[:21]), evaluated)


WIDE, BRANCHES = 2 * WIDTH, 4


def wide_batches() -> DataSet:
    """Three batches so small that what goes through layers is little beside their weights."""
    inputs = np.random.default_rng(9).normal(size=(12, WIDE))
    return DataSet((inputs, np.sin(inputs)))


def branched_model() -> Any:
    """Layers of one size, some of them in parallel."""
    import keras

    outputs = inputs = keras.Input((WIDE,))
    for number in range(0, LAYERS, BRANCHES):
        layers = [
            keras.layers.Dense(WIDE, activation="tanh", use_bias=False, name=f"layer{number + own}")
            for own in range(BRANCHES)
        ]
        outputs = keras.layers.average([layer(outputs) for layer in layers])
    return keras.Model(inputs, outputs)
