"""Which errors of TensorFlow blame another process."""

from __future__ import annotations

import tensorflow as tf

_CLASSES = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.CancelledError,
    tf.errors.AbortedError,
)


def is_peer_error(error: BaseException) -> bool:
    """Whether it tells that another process is gone, or did not answer in time."""
    return isinstance(error, _CLASSES)
