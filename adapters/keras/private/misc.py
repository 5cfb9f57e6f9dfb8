"""Patches of attributes, of Keras' check for TensorFlow, and of its dtype promotion."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.common import dtypes
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


def _probe_without_tensorflow() -> None:
    was_imported = _TENSORFLOW in sys.modules
    with without_tensorflow():
        keras.saving.serialize_keras_object(keras.layers.Dense(1))
    require(was_imported == (_TENSORFLOW in sys.modules), "a layer is written without TensorFlow")


def keep_float64() -> None:
    """Patches dtype promotion to keep float64; on torch, products and means would become float32."""
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


def _probe_keep_float64() -> None:
    table, before = dtypes.BIT64_TO_BIT32_DTYPE, dict(dtypes.BIT64_TO_BIT32_DTYPE)
    ones = keras.ops.ones(2, dtype="float64")
    if keras.backend.standardize_dtype(ones.dtype) != "float64":
        return  # JAX has float64 only when x64 is enabled
    keep_float64()
    try:
        mean = keras.ops.mean(ones)
        dtype = keras.backend.standardize_dtype(mean.dtype)
    finally:
        table.update(before)
    require(dtype == "float64", f"the mean of float64 in float64, not in {dtype}")


PROBES = (
    PrivateApiProbe("utils.module_utils.tensorflow", _probe_without_tensorflow),
    PrivateApiProbe("backend.common.dtypes.BIT64_TO_BIT32_DTYPE", _probe_keep_float64),
)
