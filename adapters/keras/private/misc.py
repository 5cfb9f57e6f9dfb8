"""Temporary patches of attributes, and of Keras' check for TensorFlow."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.utils import module_utils

from isotrain.adapters.common.private_api import PrivateApiProbe, require


@contextlib.contextmanager
def patched_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute of an object has another value."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


_TENSORFLOW = "tensorflow"


def without_tensorflow() -> contextlib.AbstractContextManager[None]:
    """Context in which Keras treats TensorFlow as not installed, unless it is already imported.

    When Keras serializes a model, it imports TensorFlow to test for TensorFlow's types, which takes seconds;
    without that import no such object can exist.
    """
    if _TENSORFLOW in sys.modules:
        return contextlib.nullcontext()
    return patched_attribute(module_utils.tensorflow, "_available", False)


def _writes_without_tensorflow() -> None:
    was_imported = _TENSORFLOW in sys.modules
    with without_tensorflow():
        keras.saving.serialize_keras_object(keras.layers.Dense(1))
    require(was_imported == (_TENSORFLOW in sys.modules), "a layer is written without TensorFlow")


PROBES = (PrivateApiProbe("utils.module_utils.tensorflow", _writes_without_tensorflow),)
