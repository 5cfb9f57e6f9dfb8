"""Weights in files of frameworks: names and arrays for any other; imports none of them by itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.adapters.keras import backend as keras_backend
from isotrain.plugin import IsotrainError, UnsupportedError

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
KERAS_SUFFIXES = (".weights.h5", ".keras")
ONNX_SUFFIX = ".onnx"
_OWN_WEIGHTS = "_torch_params."
"""Where a Keras layer on torch has its weights, each under its Keras path."""


def load_weight_arrays(path: Path, model: Any) -> dict[str, np.ndarray]:
    """Reads the weights in a file; nothing in it is run, and the model stays as it is.

    Args:
        path: Of a torch `state_dict` (`TORCH_SUFFIXES`), a file of Keras (`KERAS_SUFFIXES`), or ONNX.
        model: Which such a file of Keras must be of.

    Raises:
        IsotrainError: It cannot be read.
        UnsupportedError: It has another form, or is one of Keras and the model is not.
    """
    if path.name.endswith(TORCH_SUFFIXES):
        return dict(_of_torch(path))
    if path.name.endswith(ONNX_SUFFIX):
        return dict(_of_onnx(path))
    if not path.name.endswith(KERAS_SUFFIXES):
        known = ", ".join((".safetensors", ".npz", *KERAS_SUFFIXES, *TORCH_SUFFIXES, ONNX_SUFFIX))
        raise UnsupportedError(f"initial_weights: {path}: expected a file {known}.")
    if not keras_backend.is_keras_instance(model, "Layer"):
        raise UnsupportedError(
            f"initial_weights: {path} is for a Keras model; this one is a {type(model).__name__}."
        )
    from isotrain.adapters.keras.files import read_keras_weights

    return read_keras_weights(path, model)


def _of_torch(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    if importlib.util.find_spec("torch") is None:
        raise IsotrainError(
            f"initial_weights: {path} can be read with torch only, which is not installed here. Save it"
            " as .safetensors or .npz instead."
        )
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, among them those of a refused pickle
        raise IsotrainError(
            f"initial_weights: {path} cannot be read as a torch state_dict (nothing but tensors is"
            f" accepted): {type(error).__name__}: {error}"
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not all(map(torch.is_tensor, found.values())):
        raise IsotrainError(f"initial_weights: {path} holds no state_dict: names and tensors.")
    for name, tensor in found.items():
        wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        yield str(name).rpartition(_OWN_WEIGHTS)[2], np.array(wide.detach().numpy())


def _of_onnx(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """What the graph begins with, by the exporter's names; no other file is opened."""
    if importlib.util.find_spec("onnx") is None:
        raise IsotrainError(
            f"initial_weights: {path} is read with: pip install 'isotrain[onnx]'. Or save it as .safetensors"
            " or .npz instead."
        )
    import onnx
    from onnx import numpy_helper

    try:
        tensors = list(onnx.load(path, load_external_data=False).graph.initializer)
        outside = [each.name for each in tensors if each.data_location]
        found = {} if outside else {each.name: numpy_helper.to_array(each) for each in tensors}
    except Exception as error:  # of many kinds: the file may hold anything
        raise IsotrainError(
            f"initial_weights: {path} cannot be read as ONNX: {type(error).__name__}: {error}"
        ) from error
    if outside:
        raise IsotrainError(
            f"initial_weights: {path} has {outside[0]!r} in another file, which is not opened. Export it"
            " with all weights in one file (torch: external_data=False)."
        )
    for name, array in found.items():
        yield name, array.astype(np.float32) if array.dtype.name == "bfloat16" else array
