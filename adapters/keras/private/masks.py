"""Masks that Keras attaches to tensors."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from isotrain.adapters.common.private_api import PrivateApiProbe, require


def mask_of(tensor: Any) -> Any:
    """The boolean mask attached to a tensor, or None."""
    return get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a boolean mask to a tensor, where Keras' losses and metrics read it; None removes it."""
    set_keras_mask(tensor, mask)


def _probe_masks() -> None:
    output = keras.layers.Masking()(keras.ops.ones((1, 2, 3)))
    require(mask_of(output) is not None, "a mask on what Masking gives")
    plain = keras.ops.ones((2, 1))
    set_mask(plain, keras.ops.convert_to_tensor([True, False]))
    loss = keras.losses.MeanSquaredError(reduction="sum")(keras.ops.zeros((2, 1)), plain)
    require(float(loss) == 1.0, "a loss without the masked sample")


PROBES = (PrivateApiProbe("backend.common.masking", _probe_masks),)
