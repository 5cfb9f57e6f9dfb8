"""How Keras promotes types."""

from __future__ import annotations

import keras
from keras.src.backend.common import dtypes

from isotrain.adapters.common.private_api import PrivateApiProbe, require


def keep_float64() -> None:
    """Makes type promotion keep float64: on torch, products and means would become float32."""
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


def _keeps_64_bits() -> None:
    table, before = dtypes.BIT64_TO_BIT32_DTYPE, dict(dtypes.BIT64_TO_BIT32_DTYPE)
    ones = keras.ops.ones(2, dtype="float64")
    if keras.backend.standardize_dtype(ones.dtype) != "float64":
        return  # JAX has no float64 before it is asked to
    keep_float64()
    try:
        mean = keras.ops.mean(ones)
        found = keras.backend.standardize_dtype(mean.dtype)
    finally:
        table.update(before)
    require(found == "float64", f"the mean of float64 in float64, not in {found}")


PROBES = (PrivateApiProbe("backend.common.dtypes.BIT64_TO_BIT32_DTYPE", _keeps_64_bits),)
