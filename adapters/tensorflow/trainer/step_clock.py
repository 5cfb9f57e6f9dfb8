"""Times of the actions of a step, noted by its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf


class StepClock:
    """Notes when the actions of one replica's step end, while the step is traced.

    What comes after an action waits for its time: else a busy executor would read the clock late.

    Attributes:
        times: Seconds since 1970, float64 scalars.
    """

    def __init__(self) -> None:
        self.times: list[tf.Tensor] = []

    def mark(self, tensors: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Notes when tensors of any shapes are computed; returns them, available from then on."""
        with tf.control_dependencies([each for each in tensors if each is not None]):
            self.times.append(tf.timestamp())
        with tf.control_dependencies(self.times):
            return [None if each is None else tf.identity(each) for each in tensors]

    def mark_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Notes when a loss, a scalar, is computed; returns it: its backward pass begins then."""

        @tf.custom_gradient
        def marked(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            (noted,) = self.mark([value])

            def backward(gradient: tf.Tensor) -> tf.Tensor:
                with tf.control_dependencies([noted]):
                    return tf.identity(gradient)

            return noted, backward

        return marked(loss)
