"""Small programs of Keras and Horovod on TensorFlow, each right and with a fault; as in `programs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from integration.program_zoo.entry import Entry, Program

SAMPLES, BATCH, CLASSES = 48, 12, 3
KERAS_PROGRAMS: dict[str, Entry] = {}


def program(code: str, source: str, right: int = 1, wrong: int = 1) -> Callable[[Program], Program]:
    """Enters a program into the zoo."""

    def enter(train: Program) -> Program:
        KERAS_PROGRAMS[train.__name__] = Entry(train, code, right, wrong, source)
        return train

    return enter


def samples(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points of three clusters: float32 `[48, 8]` and int64 `[48]`."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(CLASSES, size=SAMPLES)
    centers = draw.normal(size=(CLASSES, 8))
    points = centers[labels] + 0.5 * draw.normal(size=(SAMPLES, 8))
    return points.astype("float32"), labels


def network(*, seed: int = 1, dropout: int | None = None, norm: bool = False) -> Any:
    """An MLP; its initial weights depend on the seed alone, its dropout on the seed `dropout`."""
    import keras
    from keras import layers

    def dense(units: int, name: str) -> Any:
        start = keras.initializers.GlorotUniform(seed=seed)
        return layers.Dense(units, name=name, kernel_initializer=start)

    return keras.Sequential(
        [
            keras.Input((8,)),
            dense(16, "hidden"),
            *([layers.BatchNormalization(momentum=0.5, name="norm")] if norm else []),
            layers.Activation("tanh", name="tanh"),
            *([layers.Dropout(0.5, seed=dropout, name="drop")] if dropout is not None else []),
            dense(CLASSES, "head"),
        ],
        name="mlp",
    )


def sgd(rate: float = 0.1, **options: Any) -> Any:
    import keras

    return keras.optimizers.SGD(rate, momentum=0.9, name="sgd", **options)


def part_batches(rank: int, world: int, epochs: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A process's rows of the global batches."""
    inputs, labels = samples()
    for _ in range(epochs):
        for start in range(0, SAMPLES, BATCH):
            rows = slice(start, start + BATCH)
            yield tuple(np.array_split(each[rows], world)[rank] for each in (inputs, labels))


def mean_loss(labels: np.ndarray, logits: Any) -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)


def exchanged(gradients: list[Any], world: int, summed: bool = False) -> list[Any]:
    """The means of gradients over the processes, or the sums."""
    if world == 1:
        return gradients
    import horovod.tensorflow as hvd

    return [hvd.allreduce(each, op=hvd.Sum if summed else hvd.Average) for each in gradients]


def train(
    model: Any,
    batches: Iterator[tuple[np.ndarray, np.ndarray]],
    exchange: Callable[[list[Any]], list[Any]],
    optimizer: Any = None,
    factor: float = 1.0,
) -> None:
    """A training loop of the usual kind."""
    import tensorflow as tf

    optimizer = optimizer or sgd()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = mean_loss(labels, model(inputs, training=True)) * factor
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(exchange(gradients))

    for inputs, labels in batches:
        step(tf.constant(inputs), tf.constant(labels))


@program("divided-twice", "a loss of Keras, divided by the number of processes again", 1, 2)
def divided_twice(rank: int, world: int, wrong: bool) -> None:
    batches = part_batches(rank, world)
    train(network(), batches, lambda grads: exchanged(grads, world), factor=1 / world)


@program("sum-instead-of-mean", "`hvd.allreduce` of Keras' gradients with `op=hvd.Sum`", 1, 2)
def summed(rank: int, world: int, wrong: bool) -> None:
    train(network(), part_batches(rank, world), lambda grads: exchanged(grads, world, summed=wrong))


@program("not-exchanged", "a last layer whose gradients are not in the all-reduce", 2, 2)
def late_layer(rank: int, world: int, wrong: bool) -> None:
    def exchange(grads: list[Any]) -> list[Any]:
        return [
            *exchanged(grads[:2], world),
            *(grads[2:] if wrong else exchanged(grads[2:], world)),
        ]

    train(network(), part_batches(rank, world), exchange)


@program(
    "same-random-numbers-on-every-rank", "a seed of `keras.layers.Dropout` alike everywhere", 2, 2
)
def same_dropout(rank: int, world: int, wrong: bool) -> None:
    model = network(dropout=7 if wrong else 7 + rank)
    train(model, part_batches(rank, world), lambda grads: exchanged(grads, world))


@program("batch-statistics", "Keras' batch normalisation over the samples of one process", 1, 2)
def local_batch_norm(rank: int, world: int, wrong: bool) -> None:
    train(network(norm=True), part_batches(rank, world), lambda grads: exchanged(grads, world))


@program("statistics-not-synced", "moving statistics of Keras that processes keep", 2, 2)
def own_statistics(rank: int, world: int, wrong: bool) -> None:
    import horovod.tensorflow as hvd

    model = network(norm=True)

    def exchange(grads: list[Any]) -> list[Any]:
        if not wrong:
            for variable in model.non_trainable_weights:
                variable.assign(hvd.allreduce(variable.value, op=hvd.Average))
        return exchanged(grads, world)

    train(model, part_batches(rank, world), exchange)


@program("schedule-per-process", "the rate of a Keras optimizer is set by samples of all", 2, 2)
def schedule_per_process(rank: int, world: int, wrong: bool) -> None:
    import keras

    every = 1.0 / world if wrong else 1.0
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, every, 0.8)
    batches = part_batches(rank, world, epochs=2)
    train(network(), batches, lambda grads: exchanged(grads, world), sgd(rate))


@program(
    "clipping-before-reduction",
    "horovod/horovod#1346: each process clips, and then Horovod averages",
    2,
    2,
)
def clipped_first(rank: int, world: int, wrong: bool) -> None:
    import tensorflow as tf

    def exchange(grads: list[Any]) -> list[Any]:
        if wrong:
            return exchanged(tf.clip_by_global_norm(grads, 0.1)[0], world)
        return tf.clip_by_global_norm(exchanged(grads, world), 0.1)[0]

    train(network(), part_batches(rank, world), exchange)


@program(
    "weights-not-broadcast", "horovod/horovod#672: Keras' initial weights are not broadcast", 2, 2
)
def not_broadcast(rank: int, world: int, wrong: bool) -> None:
    model = network(seed=1 + rank * wrong)
    train(model, part_batches(rank, world), lambda grads: exchanged(grads, world))


@program("learning-rate", "`model.fit` with another rate")
def other_rate(rank: int, world: int, wrong: bool) -> None:
    fit(0.2 if wrong else 0.1)


@program(
    "clipping-differs",
    "tensorflow/tensorflow#36001: `clipnorm` in place of `global_clipnorm` of Keras",
)
def other_clipping(rank: int, world: int, wrong: bool) -> None:
    fit(0.1, **({"clipnorm": 0.2} if wrong else {"global_clipnorm": 0.1}))


@program("other-order", "`model.fit` with `shuffle`")
def shuffled(rank: int, world: int, wrong: bool) -> None:
    import keras

    keras.utils.set_random_seed(3)
    fit(0.1, shuffle=wrong)


def fit(rate: float, shuffle: bool = False, **options: Any) -> None:
    model = network()
    model.compile(sgd(rate, **options), loss=mean_loss)
    model.fit(*samples(), batch_size=BATCH, epochs=1, shuffle=shuffle, verbose=0)


def clean(name: str, seed: int, rank: int, world: int) -> None:
    """A program without a fault; it trains alike on any number of processes, by a loop and by `fit`."""
    import keras

    model = network(seed=seed)
    optimizer = keras.optimizers.AdamW(1e-3) if name == "adamw" else sgd(0.05)
    if name == "fit" and world == 1:
        model.compile(optimizer, loss=mean_loss)
        model.fit(*samples(), batch_size=BATCH, shuffle=False, verbose=0)
        return
    train(model, part_batches(rank, world), lambda grads: exchanged(grads, world), optimizer)


KERAS_CLEAN = ("sgd", "adamw", "fit")
