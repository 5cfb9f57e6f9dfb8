"""Modules whose weights a TensorFlow process joins in stage 3, and others, which it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from integration.sharded_layers import step_of

from isotrain.adapters.tensorflow.comm.base import SingleReplicaCommunicator
from isotrain.adapters.tensorflow.sharded.modules import ShardedModules
from isotrain.adapters.tensorflow.sharded.trainer import ShardedTrainer
from isotrain.adapters.tensorflow.sharded.weights import ShardedWeights
from isotrain.adapters.tensorflow.trainer.base import ReplicaTrainer
from isotrain.plugin import SHARD, DeviceMesh, IsotrainError, TrainingSpec

INPUTS = tf.reshape(tf.range(16, dtype=tf.float64), (4, 4)) / 16


def _weight(seed: int, *shape: int) -> tf.Variable:
    return tf.Variable(
        tf.random.stateless_uniform(shape, (seed, 1), -0.5, 0.5, tf.float64), name="weight"
    )


class Dense(tf.Module):
    """Multiplies."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight, self.bias = _weight(seed, 4, 4), _weight(seed, 4)

    def __call__(self, inputs: Any) -> Any:
        return tf.tanh(inputs @ self.weight + self.bias)


class Norm(tf.Module):
    """Moves what it does not train, and gives more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = _weight(7, 4)
        self.mean = tf.Variable(tf.zeros(4, tf.float64), trainable=False)
        self.calls = tf.Variable(0, trainable=False)

    def __call__(self, inputs: Any, training: bool) -> Any:
        mean = tf.reduce_mean(inputs, 0)
        if training:
            self.mean.assign(0.75 * self.mean + 0.25 * mean)
            self.calls.assign_add(1)
        return (inputs - mean) * self.scale, {"mean": self.mean + 0.0, "times": 2}


class Rows(tf.Module):
    """Takes some rows, in steps of time."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = _weight(9, 5, 4), Dense(11)

    def __call__(self, places: Any, scale: Any) -> Any:
        rows = tf.nn.embedding_lookup(self.table, places) * scale
        return tf.while_loop(lambda n, _: n < 2, lambda n, r: (n + 1, self.cell(r)), (0, rows))[1]


class Doubling(tf.Module):
    """A module without weights."""

    def __call__(self, inputs: Any) -> Any:
        return 2 * inputs


class Unusual(tf.Module):
    """Modules in lists, used twice, and with a weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Dense(1), {"inner": Dense(3)}]
        self.norm, self.rows, self.head, self.tied = Norm(), Rows(), Dense(5), Dense(13)
        self.tied.weight, self.doubling = self.head.weight, Doubling()

    def __call__(self, inputs: Any, training: bool = False) -> Any:
        hidden = self.blocks[1]["inner"](self.blocks[0](inputs))
        hidden += self.rows(tf.constant([1, 2, 2, 0]), scale=hidden)
        hidden, more = self.norm(hidden, training=training)
        hidden = self.blocks[0](self.doubling(hidden + more["mean"] * more["times"]))
        return self.tied(self.head(hidden))


def unusual(spec: TrainingSpec) -> float:
    """How far a step's loss, gradients, statistics and weights are from those of whole weights."""
    spec = spec.replace(
        model={"tensorflow": Unusual},
        model_args={},
        recompute=["doubling"],
        optimizer={"name": "sgd", "lr": 0.125},
    )

    def computed(trainer: ReplicaTrainer) -> list[np.ndarray]:
        loss, gradients = step_of(trainer, (INPUTS, tf.sin(INPUTS)))()
        results = (loss, *gradients, *trainer.statistics, *trainer.part("trainable"))
        return [each.numpy() for each in results]

    found = computed(ShardedTrainer(spec, SingleReplicaCommunicator(), DeviceMesh({SHARD: 1}), 1))
    pairs = zip(found, computed(ReplicaTrainer(spec)), strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs)


class Used(tf.Module):
    """Uses a module, and its weights, in a way that is told."""

    def __init__(self, way: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.first, self.held = Dense(1), held
        self.other = Calling(lambda inputs: way(self, inputs))

    def __call__(self, inputs: Any) -> Any:
        return self.other(self.first(inputs))


class Calling(tf.Module):
    """A module with a weight, which computes in a given way."""

    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        self.own, self.moved = _weight(2, 4), tf.Variable(0.0, trainable=False)
        self.way = way

    def __call__(self, inputs: Any) -> Any:
        return self.way(inputs) * self.own


def _function(model: Any, inputs: Any) -> Any:
    return tf.function(lambda: inputs * model.other.own, autograph=False)()


def _sets(model: Any, inputs: Any) -> Any:
    model.other.own.assign_sub(model.other.own / 2)
    return inputs


def _sets_in_branch(model: Any, inputs: Any) -> Any:
    set_one = model.other.moved.assign
    return inputs + tf.cond(inputs[0, 0] > 0, lambda: set_one(1.0), lambda: tf.zeros(()))[..., None]


TRIED: dict[str, Callable[[], tf.Module]] = {
    "past": lambda: Used(lambda model, inputs: inputs @ model.first.weight),
    "in a function": lambda: Used(_function),
    "sets": lambda: Used(_sets),
    "sets in a branch": lambda: Used(_sets_in_branch),
    "draws": lambda: Used(lambda model, inputs: tf.nn.dropout(inputs, 0.5)),
    "layer": lambda: Used(lambda model, inputs: inputs, layer=keras.layers.Dense(1)),
    "called in a loop": lambda: Looping(),
    "refers back": lambda: _referring(Used(lambda model, inputs: inputs)),
}


def _referring(model: Any) -> tf.Module:
    model.first.owner = model
    return model  # type: ignore[no-any-return]


class Looping(tf.Module):
    """Calls a module in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Dense(1)

    def __call__(self, inputs: Any) -> Any:
        return tf.while_loop(lambda n, _: n < 2, lambda n, r: (n + 1, self.inner(r)), (0, inputs))[
            1
        ]


def refusals() -> dict[str, str]:
    """Errors of modules that cannot be fully sharded."""
    found = {}
    for name, make in TRIED.items():
        try:
            tf.function(_forward(make()), autograph=False).get_concrete_function()
        except IsotrainError as error:
            found[name] = str(error)
    return found


def _forward(model: Any) -> Callable[[], Any]:
    trained = list(model.trainable_variables)
    weights = ShardedWeights(trained, SingleReplicaCommunicator(), DeviceMesh({SHARD: 1}))
    modules = ShardedModules(model, weights, unit_bytes=1)

    def forward() -> Any:
        with modules.gather_on_read():
            return model(INPUTS)

    return forward
