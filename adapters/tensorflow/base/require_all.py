"""Checks of values in a step, which also hold in a `tf.function`; XLA leaves them out."""

from __future__ import annotations

import re

import tensorflow as tf

from isotrain.adapters.common import class_targets
from isotrain.plugin import SpecError

_FAILED = re.compile(r"assertion failed: \[(loss: .*)\] \[(-?\d+)\]")
_CLASSES = re.compile(r"outside the valid range of \[0, (\d+)\)")
"""Part of the error of a cross-entropy of classes."""
_ANYWHERE = "loss, objective, metrics or model", "sparse_categorical_crossentropy"
"""Where a cross-entropy may be that is no loss or metric of Keras by itself, and its name."""


def require_all(is_valid: tf.Tensor, values: tf.Tensor, expectation: str) -> None:
    """Fails unless all values are valid: with an error that `refusal_of` reads.

    Args:
        is_valid: Whether each value is valid, bool, any shape.
        values: The values, same shape.
        expectation: Error message, to which the first invalid value is added.

    Raises:
        SpecError: A value is invalid, and no function is traced.
    """
    if tf.executing_eagerly():
        if not tf.reduce_all(is_valid):
            raise class_targets.received(expectation, values[~is_valid][0].numpy())
        return
    first = tf.argmin(tf.cast(tf.reshape(is_valid, [-1]), tf.int32))
    value = tf.gather(tf.concat([tf.reshape(values, [-1]), [0]], 0), first)  # there may be none
    tf.debugging.Assert(tf.reduce_all(is_valid), [expectation, value])


def refusal_of(error: tf.errors.InvalidArgumentError) -> SpecError | None:
    """The error of `require_all`, or of a cross-entropy of classes, for people; None for others."""
    if failed := _FAILED.search(error.message):
        return class_targets.received(failed[1].replace(r"\'", "'"), failed[2])
    target = class_targets.invalid_class(error)
    if target is None:
        return None
    classes = _CLASSES.search(error.message)
    field, name = class_targets.in_scope(error.message) or _ANYWHERE
    expected = class_targets.expectation(field, name, int(classes[1]) if classes else None)
    return class_targets.received(expected, target)
