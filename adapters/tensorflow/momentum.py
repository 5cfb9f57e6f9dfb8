"""Keras' SGD with momentum, by one operation of TensorFlow for each weight in the place of five."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from isotrain.adapters.keras_private.optimizers import momentum_of
from isotrain.adapters.tensorflow.state import native


def update_at_once(optimizer: keras.optimizers.Optimizer) -> None:
    """Has plain SGD with momentum read and write each weight and its slot once, with the same bits.

    On CPUs only: on a GPU one kernel may round a product and the sum that it goes into together.
    """
    if type(optimizer) is not keras.optimizers.SGD or not optimizer.momentum:
        return
    if tf.config.list_logical_devices("GPU"):
        return

    def update(gradient: Any, variable: Any, rate: Any) -> None:
        dtype = variable.dtype
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=native(momentum_of(optimizer, variable)).handle,
            lr=ops.cast(rate, dtype),
            grad=ops.cast(gradient, dtype),
            momentum=ops.cast(optimizer.momentum, dtype),
            use_nesterov=optimizer.nesterov,
        )

    optimizer.update_step = update
