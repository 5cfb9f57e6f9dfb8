"""Keras' dtype promotion."""

from __future__ import annotations

import keras
from keras.src.backend.common import dtypes

from isotrain.adapters.common.private_api import PrivateApiProbe, require


def keep_float64() -> None:
    """Patches dtype promotion to keep float64; on torch, products and means would become float32."""
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


def _keeps_64_bits() -> None:
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


PROBES = (PrivateApiProbe("backend.common.dtypes.BIT64_TO_BIT32_DTYPE", _keeps_64_bits),)
