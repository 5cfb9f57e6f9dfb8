"""Random numbers by sample on TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.common.sample_draws import (
    BITS,
    REFUSAL,
    DrawKeys,
    PassDraws,
    threefry_2x32,
)
from isotrain.plugin import SpecError


class TensorFlowPassDraws(PassDraws):
    """Random numbers by sample of one pass that is traced; the position is a uint32 tensor."""

    math = tf.math

    def __init__(self, keys: DrawKeys, position: tf.Tensor, rows: Any, is_training: bool) -> None:
        super().__init__(keys, position, rows, is_training)
        self._graph = tf.compat.v1.get_default_graph()

    def cast(self, x: tf.Tensor, dtype: str | tf.DType) -> tf.Tensor:
        return tf.cast(x, dtype)

    def _integers(self, key: tuple[int, int], rows: Any, blocks: Any, by_sample: bool) -> tf.Tensor:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise SpecError(REFUSAL.format("a loop, tf.function or vectorized map of the model"))
        samples, numbers = (tf.cast(tf.range(size), tf.uint32) for size in (rows, blocks))
        if by_sample:
            samples += self._position[1]
        counters = [
            tf.broadcast_to(each, (rows, blocks)) for each in (samples[:, None], numbers[None, :])
        ]
        keys = tf.constant(key[0], tf.uint32), self._position[0] + tf.constant(key[1], tf.uint32)
        words = _random_words(*keys, *counters)
        bits = tf.bitwise.right_shift(tf.stack(words, -1), tf.constant(32 - BITS, tf.uint32))
        return tf.reshape(tf.cast(bits, tf.int32), (rows, 2 * blocks))

    def _in_shape(self, x: tf.Tensor, shape: Sequence[Any]) -> tf.Tensor:
        if not len(shape):
            return x[0, 0]
        width: Any = 1
        for size in shape[1:]:
            width *= size
        return tf.reshape(x[:, :width], shape)

    def _halves(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x[:, 0::2], x[:, 1::2]

    def _interleaved(self, even: tf.Tensor, odd: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.stack((even, odd), -1), (tf.shape(even)[0], -1))

    def _at_most(self, x: tf.Tensor, largest: float) -> tf.Tensor:
        return tf.minimum(x, largest)

    def shape_of(self, x: tf.Tensor) -> Sequence[Any]:
        return self.sizes_of(x)

    @staticmethod
    def sizes_of(x: tf.Tensor) -> list[Any]:
        """Sizes of a tensor's axes: numbers where they are known, else scalar tensors."""
        dynamic = tf.unstack(tf.shape(x))
        return [each if size is None else size for size, each in zip(x.shape, dynamic, strict=True)]


_WORD, _WORDS = tf.TensorSpec([], tf.uint32), tf.TensorSpec([None, None], tf.uint32)


@tf.function(input_signature=[_WORD, _WORD, _WORDS, _WORDS], autograph=False)
def _random_words(
    key: tf.Tensor, key_with_step: tf.Tensor, samples: tf.Tensor, numbers: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Random words of the shape of the counters, `[rows, blocks]`.

    It is traced once in a process: these are 160 operations, which take a quarter of a second for each draw.
    """
    return threefry_2x32((key, key_with_step), (samples, numbers), _rotated)


def _rotated(words: tf.Tensor, bits: int) -> tf.Tensor:
    """Rotates uint32 words, any shape, to the left."""
    left, right = (tf.constant(each, tf.uint32) for each in (bits, 32 - bits))
    return tf.bitwise.left_shift(words, left) | tf.bitwise.right_shift(words, right)
