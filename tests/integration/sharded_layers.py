"""Layers whose weights a TensorFlow process joins in stage 3, and others, which it refuses; loads Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from isotrain.adapters.keras.weight_sharding import require_shardable
from isotrain.adapters.tensorflow.comm.base import SingleReplicaCommunicator
from isotrain.adapters.tensorflow.sharded.keras_layers import ShardedLayers
from isotrain.adapters.tensorflow.sharded.trainer import ShardedTrainer
from isotrain.adapters.tensorflow.sharded.weights import ShardedWeights
from isotrain.adapters.tensorflow.trainer.base import ReplicaTrainer
from isotrain.plugin import DATA, SHARD, DeviceMesh, IsotrainError, Subgroups, TrainingSpec

WORDS = tf.constant([[1, 2, 0], [3, 0, 0], [4, 4, 1], [2, 1, 3]], tf.int32)
_DRAWN = "StatelessRandomUniformV2"
TARGETS = tf.reshape(tf.range(8, dtype=tf.float64), (4, 2))


class Adding(keras.layers.Layer):  # type: ignore[misc]
    """A layer with a weight, a layer inside, a regularizer, and a loss that it adds."""

    def __init__(self) -> None:
        super().__init__(name="adding")
        self.inner = keras.layers.Dense(4, name="inner")
        self.inner.build((None, 4))
        self.scale = self.add_weight(shape=(4,), name="scale", regularizer="l2")

    def call(self, inputs: Any) -> Any:
        outputs = self.inner(inputs)
        self.add_loss(keras.ops.mean(outputs**2))
        return outputs * self.scale


def unusual_model() -> Any:
    """Layers that are shared, lie inside others, recur, move, draw, mask, and add losses."""
    layers = keras.layers
    words = keras.Input((3,), dtype="int32")
    shared = layers.Dense(4, activation="tanh", kernel_regularizer="l1", name="shared")
    embedded = layers.Embedding(5, 4, mask_zero=True)(words)
    added = layers.add([shared(layers.Activation("tanh")(embedded)), shared(embedded)])
    summed = layers.add([layers.GlobalAveragePooling1D()(added), layers.SimpleRNN(4)(embedded)])
    pooled = layers.BatchNormalization()(summed)
    inner = keras.Input((4,))
    block = keras.Model(inner, layers.Dropout(0.5)(Adding()(inner)), name="block")
    outputs = layers.Dropout(0.5)(block(pooled))
    return keras.Model(words, layers.Dense(2, name="head")(outputs))


BLOCK_BYTES = 8 * (4 * 4 + 4 + 4)
"""Bytes of the largest layer that is unsharded as a whole though it has others inside."""


class Twins(SingleReplicaCommunicator):
    """Two hosts of a replica each, which have the same.

    Attributes:
        pairs: How often two numbers were summed over the parts of a host.
    """

    replicas = 2
    pairs = 0

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        self.pairs += len(subgroups[0]) == 1 and tensor.shape == (2,)
        return tensor * len(subgroups[0])


def unusual(spec: TrainingSpec) -> dict[str, float]:
    """How far a step's loss, gradients, statistics and weights are from those of whole weights.

    Returns:
        That; and how often random numbers are drawn, and norms of a weight and its update are summed.
    """
    spec = spec.replace(
        model=unusual_model,
        model_args={},
        recompute="*",
        optimizer={"name": "lamb", "lr": 0.125, "weight_decay": 0.125},
        clip={"norm": 0.25},
    )

    def computed(trainer: ReplicaTrainer) -> tuple[list[np.ndarray], int]:
        step = step_of(trainer, (WORDS, TARGETS)).get_concrete_function()
        loss, gradients = step()
        results = (loss, *gradients, *trainer.statistics, *trainer.part("trainable"))
        draws = [each for each in step.graph.get_operations() if each.type == _DRAWN]
        return [each.numpy() for each in results], len(draws)

    twins, hosts = Twins(), DeviceMesh({DATA: 2, SHARD: 1})
    results, draws = computed(ShardedTrainer(spec, twins, hosts, BLOCK_BYTES))
    expected, _ = computed(ReplicaTrainer(spec))
    pairs = zip(results, expected, strict=True)
    far = max(float(np.abs(one - other).max()) for one, other in pairs)
    return {"far": far, "draws": draws, "norms": twins.pairs}


def mixed_model() -> Any:
    """Layers that TensorFlow's optimizer of graphs makes one operation of, which rounds once less."""
    hidden = keras.layers.Dense(8, activation="gelu")
    return keras.Sequential([keras.Input((2,)), hidden, keras.layers.Dense(2)])


class Typed(SingleReplicaCommunicator):
    """Notes of what types are the gradients that are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()

    def reduce_scatter(
        self, vector: tf.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> tuple[tf.Tensor, tf.Tensor]:
        self.types.add(vector.dtype.name)
        return super().reduce_scatter(vector, sizes, subgroups)


def in_bfloat16(spec: TrainingSpec) -> dict[str, Any]:
    """How far a step's loss, gradients and weights are from those of whole weights, as Keras computes them.

    Returns:
        That, and of what types gradients are summed.
    """
    spec = spec.replace(model=mixed_model, precision="bfloat16", clip=None)
    results, alone = [], Typed()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    for trainer in (ShardedTrainer(spec, alone, DeviceMesh({SHARD: 1}), 1), ReplicaTrainer(spec)):
        loss, gradients = step_of(trainer, (TARGETS, TARGETS))()
        results.append([loss, *gradients, *trainer.part("trainable")])
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    far = max(float(tf.reduce_max(tf.abs(a - b))) for a, b in zip(*results, strict=True))
    return {"far": far, "summed": sorted(alone.types)}


def _sets(layer: Any, first: Any, inputs: Any) -> Any:
    layer.kernel.assign(layer.kernel / 2)


def _reads_past(layer: Any, first: Any, inputs: Any) -> Any:
    return inputs @ (layer.kernel + first.kernel)


def _reads_outside(layer: Any, first: Any, inputs: Any) -> Any:
    return inputs @ first.kernel


def _branches(layer: Any, first: Any, inputs: Any) -> Any:
    return keras.ops.cond(keras.ops.mean(inputs) > 0, lambda: inputs, lambda: first(inputs))


def _draws(layer: Any, first: Any, inputs: Any) -> Any:
    return inputs @ layer.kernel + tf.random.normal((2,), dtype=inputs.dtype)


def _draws_unseeded(layer: Any, first: Any, inputs: Any) -> Any:
    return inputs @ layer.kernel + keras.random.uniform((2,))


def _skips(layer: Any, first: Any, inputs: Any) -> Any:
    return inputs


class Holding(keras.layers.Layer):  # type: ignore[misc]
    """A layer with a regularized layer inside that may not be called, or with none."""

    def __init__(self, way: Callable[..., Any], first: Any, regularized: bool) -> None:
        super().__init__(name="holding")
        self._way = lambda inputs: way(self, first, inputs)
        if regularized:
            self.inner = keras.layers.Dense(2, kernel_regularizer="l2", name="inner")
            self.inner.build((None, 2))

    def call(self, inputs: Any) -> Any:
        return self._way(inputs)


class Recurring(keras.layers.Layer):  # type: ignore[misc]
    """A layer that loops; its cell alone would not be unsharded."""

    def __init__(self) -> None:
        super().__init__(name="recurring")
        self.inner = keras.layers.SimpleRNN(2)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs[:, None])


class Called(keras.layers.Dense):  # type: ignore[misc]
    """Computes in a way that is told."""

    def __init__(self, way: Callable[..., Any], first: Any) -> None:
        super().__init__(2, name="called")
        self._way = lambda inputs: way(self, first, inputs)

    def call(self, inputs: Any) -> Any:
        return self._way(inputs)


TRIED: dict[str, Callable[[Any], Any]] = {
    "recurs": lambda first: Recurring(),
    "constraint": lambda first: keras.layers.Dense(2, kernel_constraint="non_neg"),
    "sets": lambda first: Called(_sets, first),
    "reads past": lambda first: Called(_reads_past, first),
    "reads outside": lambda first: Holding(_reads_outside, first, regularized=False),
    "reads outside, again": lambda first: Holding(_reads_outside, first, regularized=False),
    "branches": lambda first: Holding(_branches, first, regularized=False),
    "draws": lambda first: Called(_draws, first),
    "draws unseeded": lambda first: Called(_draws_unseeded, first),
    "skips": lambda first: Holding(_skips, first, regularized=True),
}


AGAIN = ("reads outside, again",)
"""With `recompute`, by which a layer without weights is called otherwise."""


def refusals(spec: TrainingSpec) -> dict[str, str]:
    """Errors of layers that cannot be fully sharded; nothing for others."""
    found, again = {}, spec.replace(recompute="*")
    for name, make in TRIED.items():
        first = keras.layers.Dense(2, name="first")
        model = keras.Sequential([keras.Input((2,)), first, make(first)])
        try:
            require_shardable({variable.path: variable for variable in model.trainable_variables})
            recomputing = again if name in AGAIN else spec.replace(recompute=None)
            tf.function(_forward(model, recomputing), autograph=False).get_concrete_function()
        except IsotrainError as error:
            found[name] = str(error)
    return found


def _forward(model: Any, spec: TrainingSpec) -> Callable[[], Any]:
    weights = ShardedWeights(
        model.trainable_variables, SingleReplicaCommunicator(), DeviceMesh({SHARD: 1})
    )
    layers = ShardedLayers(model, weights, unit_bytes=1)
    layers.recompute(model, spec)

    def forward() -> Any:
        with layers.gather_on_read():
            return model(TARGETS, training=True)

    return forward


def step_of(trainer: ReplicaTrainer, micro_batch: Any) -> Any:
    """A step on a slice as a function of TensorFlow: it gives the loss and the gradients."""

    def trace() -> Any:
        loss, gradients = trainer.contribution(
            [micro_batch], None, has_placeholders=False, total=tf.identity
        )
        with trainer.update.learning_rate(tf.constant(0.125, tf.float64)):
            trainer.update.apply(gradients)
        return loss, gradients

    return tf.function(trace, autograph=False)
