"""Gives an attribute another value for a while."""

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
    """Within it, an attribute has another value."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


_TENSORFLOW = "tensorflow"


def without_tensorflow() -> contextlib.AbstractContextManager[None]:
    """Has Keras take TensorFlow to be absent, unless it has been imported.

    To see whether what it writes of a model is TensorFlow's, Keras imports it, which takes seconds; nobody
    has anything of it before.
    """
    if _TENSORFLOW in sys.modules:
        return contextlib.nullcontext()
    return patched_attribute(module_utils.tensorflow, "_available", False)


def _writes_without_tensorflow() -> None:
    was_there = _TENSORFLOW in sys.modules
    with without_tensorflow():
        keras.saving.serialize_keras_object(keras.layers.Dense(1))
    require(was_there == (_TENSORFLOW in sys.modules), "a layer is written without TensorFlow")


PROBES = (PrivateApiProbe("utils.module_utils.tensorflow", _writes_without_tensorflow),)
