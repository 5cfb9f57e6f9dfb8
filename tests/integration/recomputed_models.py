"""Models whose layers are computed again in the backward pass, and how much is alive in that time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

import isotrain


def data() -> Any:
    """Twelve rows of five words: the last global batch of an epoch is smaller than the others."""
    generator = np.random.default_rng(7)
    words = generator.integers(0, 7, (12, 5)).astype("int32")
    words[:, 4:] = 0
    return isotrain.DataSet((words, generator.integers(0, 4, 12)))


def portable() -> Any:
    """A model with masks, dropout, attention, moving statistics, added losses and nested layers."""
    from keras import Input, Model, Sequential, layers

    block = [
        layers.Dense(16, activation="relu"),
        layers.Dropout(0.5),
        layers.BatchNormalization(),
        layers.Dense(8, activity_regularizer="l2"),
        layers.ActivityRegularization(l2=0.25),
    ]
    inputs = Input((5,), dtype="int32")
    embedded = layers.Embedding(7, 8, mask_zero=True)(inputs)
    attended = layers.MultiHeadAttention(2, 4, dropout=0.25, name="attention")(embedded, embedded)
    inner = Sequential([Input((5, 8)), *block], name="block")(attended)
    pooled = layers.GlobalAveragePooling1D()(layers.add([attended, inner]))
    return Model(inputs, layers.Dense(4, name="head")(pooled))


def drawing() -> Any:
    """A layer draws by a generator that is not its own."""
    from keras import Input, Sequential, layers, ops, random

    class Drawing(layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return inputs * random.uniform(ops.shape(inputs))

    block = Sequential([Input((8,)), Drawing()], name="block")
    return Sequential([Input((5,)), layers.Dense(8), block, layers.Dense(4, name="head")])


def of_torch() -> Any:
    """A torch model with dropout, moving statistics, its own generator and a list of blocks."""
    import torch
    from torch import nn

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.scale.mul_(0.5)
            noise = torch.rand(inputs.shape, generator=self.generator, dtype=inputs.dtype)
            return inputs * (1 + self.scale.clone() * noise)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 8)
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(40, 40), nn.BatchNorm1d(40), Noise(), nn.Dropout(0.5), nn.Tanh()
                )
                for _ in range(2)
            )
            self.head = nn.Linear(40, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = self.embedding(inputs).flatten(1)
            for block in self.blocks:
                outputs = block(outputs)
            return self.head(outputs)

    return Net()


def of_tensorflow(counting: bool = False) -> Any:
    """Two blocks as a tf.Module, which may count their calls."""
    import tensorflow as tf

    class Block(tf.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            drawn = tf.random.stateless_uniform((5, 5), (seed, 1), -1, 1, tf.float64)
            self.kernel = tf.Variable(drawn)
            self.calls = tf.Variable(0, trainable=False) if counting else None

        def __call__(self, inputs: Any, bent: bool, *, beside: Any = None) -> Any:
            if self.calls is not None:
                self.calls.assign_add(1)
            outputs = (inputs if beside is None else inputs + beside) @ self.kernel
            return tf.tanh(outputs) if bent else outputs

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [Block(1), Block(2)]
            self.blocks[1].owner = self
            self.scale = tf.Variable(tf.ones((5,), tf.float64))
            self.head = tf.Variable(tf.ones((5, 4), tf.float64))

        def __call__(self, inputs: Any) -> Any:
            outputs = tf.cast(inputs, tf.float64)
            beside = outputs * self.scale  # its gradient comes through a block alone
            for block in self.blocks:
                outputs = block(outputs, True, beside=beside)
            return outputs @ self.head

    return Net()


def deep(native: bool = False) -> Any:
    """Eight blocks of three layers each, for a batch that is much larger than the weights."""
    if native:
        from torch import nn

        inner = [[nn.Linear(64, 64), nn.Tanh()] * 3 for _ in range(8)]
        return nn.Sequential(*(nn.Sequential(*block) for block in inner), nn.Linear(64, 4))
    from keras import Input, Sequential, layers

    def block() -> Any:
        dense = [layers.Dense(64, activation="tanh") for _ in range(3)]
        return Sequential([Input((64,)), *dense])

    return Sequential([Input((64,)), *(block() for _ in range(8)), layers.Dense(4, name="head")])


def wide_data() -> Any:
    generator = np.random.default_rng(7)
    return generator.standard_normal((2048, 64), "float32"), generator.integers(0, 4, 2048)


def peak_bytes(session: isotrain.Session) -> int:
    """The most bytes that were alive at once in a training step, the last one."""
    peak = 0
    for batch in session.batches():
        if session.plan.framework == "torch":
            with _watch() as watch:
                session.step(batch)
            peak = watch.peak
        else:
            peak = peak_of_tensorflow(session, batch)
    return peak


def most_bytes(work: Callable[[], object], besides: Sequence[Any]) -> int:
    """The most bytes of torch's tensors that are alive at once in some work, besides those of others."""
    with _watch({each.untyped_storage().data_ptr() for each in besides}) as watch:
        work()
    return int(watch.peak)


def peak_of_tensorflow(session: isotrain.Session, batch: Any) -> int:
    """Peak bytes of TensorFlow's allocator, which counts with TF_CPU_ALLOCATOR_USE_BFC."""
    import tensorflow as tf

    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    float(session.step(batch))
    return int(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)


def _watch(besides: Set[int] | None = None) -> Any:
    """Counts what torch makes; and what it is given, but for some storages, where these are told."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):
        """Sees every tensor that torch makes, and when its memory is given back."""

        def __init__(self) -> None:
            super().__init__()
            self.alive: set[int] = set()
            self.now = self.peak = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = function(*args, **(kwargs or {}))
            for leaf in tree_leaves(given if besides is None else (args, given)):
                if hasattr(leaf, "untyped_storage"):
                    self._see(leaf.untyped_storage())
            return given

        def _see(self, storage: Any) -> None:
            place, size = storage.data_ptr(), storage.nbytes()
            if size and place not in self.alive and place not in (besides or ()):
                self.alive.add(place)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, place, size)

        def _gone(self, place: int, size: int) -> None:
            self.now -= size
            self.alive.discard(place)

    return Watch()
