"""The forms in which a trained model leaves isotrain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

ExportForm = Literal["keras", "keras-weights", "torch", "safetensors", "onnx", "saved-model"]
"""`keras`: a Keras model. `keras-weights`: its weights. `torch`: a `state_dict`. `safetensors`: weights by
name. `onnx`: the computation of predictions, for ONNX. `saved-model`: the same for TensorFlow, a folder."""
FORMS: tuple[ExportForm, ...] = get_args(ExportForm)
SUFFIXES: Mapping[ExportForm, tuple[str, ...]] = {
    "keras": (".keras",),
    "keras-weights": (".weights.h5",),
    "torch": (".pt", ".pth"),
    "safetensors": (".safetensors",),
    "onnx": (".onnx",),
    "saved-model": (),
}
"""How the names of files of each form end; a folder's name is free."""
