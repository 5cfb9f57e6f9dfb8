"""Reads weights from files of frameworks as names and arrays; imports a framework only for its own files."""

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
_KERAS_LAYER_PREFIX = "_torch_params."
"""Name part under which a Keras layer on torch holds its weights, each under its Keras path."""


def load_weight_arrays(path: Path, model: Any) -> dict[str, np.ndarray]:
    """Reads the weights in a file; no code in it is run, and the model is not changed.

    Args:
        path: A torch `state_dict` (`TORCH_SUFFIXES`), a Keras file (`KERAS_SUFFIXES`), or ONNX.
        model: Model to which a Keras file must belong.

    Returns:
        Arrays by name, of the weights' shapes and dtypes; bfloat16 becomes float32.

    Raises:
        IsotrainError: The file cannot be read.
        UnsupportedError: The file has another format, or is a Keras file and the model is not a Keras model.
    """
    if path.name.endswith(TORCH_SUFFIXES):
        return dict(_read_torch(path))
    if path.name.endswith(ONNX_SUFFIX):
        return dict(_read_onnx(path))
    if not path.name.endswith(KERAS_SUFFIXES):
        suffixes = ", ".join(
            (".safetensors", ".npz", *KERAS_SUFFIXES, *TORCH_SUFFIXES, ONNX_SUFFIX)
        )
        raise UnsupportedError(f"initial_weights: {path}: expected a file {suffixes}.")
    if not keras_backend.is_keras_instance(model, "Layer"):
        raise UnsupportedError(
            f"initial_weights: {path} is for a Keras model; this one is a {type(model).__name__}."
        )
    from isotrain.adapters.keras.files import read_keras_weights

    return read_keras_weights(path, model)


def _read_torch(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of a torch file by name, in their shapes; float32 for bfloat16.

    Raises:
        IsotrainError: torch is missing, or the file holds something else than tensors by name.
    """
    if importlib.util.find_spec("torch") is None:
        raise IsotrainError(
            f"initial_weights: {path} can be read with torch only, which is not installed here. Save it"
            " as .safetensors or .npz instead."
        )
    import torch

    try:
        state_dict = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types, such as that of a refused pickle
        raise IsotrainError(
            f"initial_weights: {path} cannot be read as a torch state_dict (nothing but tensors is"
            f" accepted): {type(error).__name__}: {error}"
        ) from error
    if isinstance(state_dict, Mapping) and isinstance(state_dict.get("state_dict"), Mapping):
        state_dict = state_dict["state_dict"]
    if not isinstance(state_dict, Mapping) or not all(map(torch.is_tensor, state_dict.values())):
        raise IsotrainError(f"initial_weights: {path} holds no state_dict: names and tensors.")
    for name, tensor in state_dict.items():
        readable = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        yield str(name).rpartition(_KERAS_LAYER_PREFIX)[2], np.array(readable.detach().numpy())


def _read_onnx(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Initializers of the graph, in their shapes, by the exporter's names; no other file is opened.

    Raises:
        IsotrainError: onnx is missing, or the file holds no complete graph.
    """
    if importlib.util.find_spec("onnx") is None:
        raise IsotrainError(
            f"initial_weights: {path} is read with: pip install 'isotrain[onnx]'. Or save it as .safetensors"
            " or .npz instead."
        )
    import onnx
    from onnx import numpy_helper

    try:
        tensors = list(onnx.load(path, load_external_data=False).graph.initializer)
        external = [tensor.name for tensor in tensors if tensor.data_location]
        arrays = (
            {} if external else {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}
        )
    except Exception as error:  # of many types: the file may hold anything
        raise IsotrainError(
            f"initial_weights: {path} cannot be read as ONNX: {type(error).__name__}: {error}"
        ) from error
    if external:
        raise IsotrainError(
            f"initial_weights: {path} has {external[0]!r} in another file, which is not opened. Export it"
            " with all weights in one file (torch: external_data=False)."
        )
    for name, array in arrays.items():
        yield name, array.astype(np.float32) if array.dtype.name == "bfloat16" else array
