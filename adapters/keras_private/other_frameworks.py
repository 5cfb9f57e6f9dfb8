"""When Keras imports a framework that it does not run on."""

from __future__ import annotations

import contextlib
import sys

import keras
from keras.src.utils import module_utils

from isotrain.adapters.keras_private.replacing import patched_attribute
from isotrain.adapters.private_parts import PrivateApiProbe, require

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
