"""Models and data of the pipeline tests."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


def data() -> Any:
    """The last global batch is smaller than the others."""
    generator = np.random.default_rng(7)
    inputs, targets = generator.standard_normal((31, 6)), generator.integers(0, 4, 31)
    return isotrain.DataSet((inputs[:22], targets[:22]), (inputs[22:], targets[22:]))


def short() -> Any:
    """The last global batch has as many samples as there are replicas: others of micro-batches are empty."""
    generator = np.random.default_rng(9)
    inputs, targets = generator.standard_normal((11, 6)), generator.integers(0, 4, 11)
    return isotrain.DataSet((inputs[:10], targets[:10]), (inputs[10:], targets[10:]))


def even() -> Any:
    """All global batches have one size, for which TensorFlow traces once."""
    generator = np.random.default_rng(8)
    inputs, targets = generator.standard_normal((32, 6)), generator.integers(0, 4, 32)
    return isotrain.DataSet((inputs[:24], targets[:24]), (inputs[24:], targets[24:]))


def skipping(normalised: bool = True, dropped: float = 0.25) -> Any:
    """Layers skip others, one is an operation, and one takes what the model is given."""
    from keras import Input, Model, layers
    from keras.regularizers import L2

    inputs = Input((6,))
    first = layers.Dense(8, activation="tanh", name="first")(inputs)
    second = layers.Dense(8, activation="tanh", kernel_regularizer=L2(2.0**-7), name="second")(
        first
    )
    third = layers.Dense(8, name="third")(first + layers.Dropout(dropped, name="dropout")(second))
    outputs = layers.BatchNormalization(name="norm")(third) if normalised else third
    outputs = layers.ActivityRegularization(l2=0.125)(layers.concatenate([outputs, first, inputs]))
    return Model(inputs, layers.Dense(4, name="head")(outputs))


def sequential() -> Any:
    from keras import Input, Sequential, layers

    dense = [layers.Dense(7, activation="tanh", name=f"dense_{n}") for n in range(3)]
    return Sequential([Input((6,)), *dense, layers.Dense(4, name="head")])


def modules() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
        nn.Tanh(),
        nn.Linear(8, 4),
    )


def reentrant() -> Any:
    """Its second module is computed again in backward passes, by torch's older kind of checkpoint."""
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return checkpoint(super().forward, inputs, use_reentrant=True)

    return nn.Sequential(nn.Linear(6, 8), Again(8, 8), nn.Linear(8, 4)).double()


def written(names_them: bool = False) -> Any:
    """Modules that a `forward` of its own applies, one after the other."""
    from torch import Tensor, nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.bend = nn.Tanh()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)
            )
            self.head = nn.Linear(8, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.bend(self.first(inputs))
            for block in self.blocks:
                outputs = block(outputs)
            return self.head(outputs)

    class Naming(Net):
        def pipeline_modules(self) -> list[nn.Module]:
            return [self.first, self.bend, *self.blocks, self.head]

    return Naming() if names_them else Net()


def layers_by_name() -> dict[str, Any]:
    """The layers of `sequential`, built alike, for models of TensorFlow that apply them themselves."""
    from keras import layers, name_scope

    found = {f"dense_{n}": layers.Dense(7, activation="tanh", name=f"dense_{n}") for n in range(3)}
    found["head"] = layers.Dense(4, name="head")
    with name_scope("sequential"):
        for layer, width in zip(found.values(), (6, 7, 7, 7), strict=True):
            layer.build((None, width))
    return found


def layered() -> Any:
    """The layers of `sequential` as a model of Keras without a graph."""
    import keras

    class Net(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense_0, self.dense_1, self.dense_2, self.head = layers_by_name().values()
            self.built = True

        def call(self, inputs: Any) -> Any:
            return self.head(self.dense_2(self.dense_1(self.dense_0(inputs))))

    return Net()


def module() -> Any:
    """The layers of `sequential` as a tf.Module, which also draws random numbers on its last stage."""
    import tensorflow as tf

    class Dense(tf.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.kernel, self.bias = (tf.Variable(w.value, name=w.path) for w in layer.weights)

        def __call__(self, inputs: Any) -> Any:
            return inputs @ self.kernel + self.bias

    class Noise(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = tf.random.Generator.from_seed(3)

        def __call__(self, inputs: Any, training: bool = False) -> Any:
            if not training:
                return inputs
            return inputs * tf.math.ceil(self.generator.uniform([], dtype=inputs.dtype))

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            *self.blocks, self.head = map(Dense, layers_by_name().values())
            self.noise = Noise()

        def __call__(self, inputs: Any, training: bool = False) -> Any:
            for block in self.blocks:
                inputs = tf.tanh(block(inputs))
            return self.head(self.noise(inputs, training=training))

        def pipeline_modules(self) -> list[Any]:
            bent = [part for block in self.blocks for part in (block, tf.tanh)]
            return [*bent, self.noise, self.head]

    return Net()


def shared() -> Any:
    from keras import Input, Model, layers

    inputs, twice = Input((6,)), layers.Dense(6, name="twice")
    return Model(inputs, layers.Dense(4, name="head")(twice(twice(inputs))))


def tied() -> Any:
    import keras

    inputs = keras.Input((6,))
    first = keras.layers.Dense(7, name="first")
    hidden = keras.layers.Dense(7, name="second")(first(inputs))
    back = keras.layers.Lambda(
        lambda given: keras.ops.matmul(given, keras.ops.transpose(first.kernel)), name="back"
    )
    return keras.Model(inputs, keras.layers.Dense(4, name="head")(back(hidden)))
