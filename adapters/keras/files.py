"""Export of models, and reading of weights, in Keras' file formats.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import functools
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras import private as keras_private
from isotrain.plugin import ExportForm, IsotrainError, UnsupportedError


def write(model: keras.Layer, form: ExportForm, target: Path, inputs: Any | None = None) -> None:
    """Writes a model in one of Keras' export forms.

    Args:
        model: Model to write.
        form: Export form.
        target: File or folder to write.
        inputs: Inputs of a few samples, first axis samples, for a model without symbolic inputs.

    Raises:
        UnsupportedError: The model is not a `keras.Model`, or Keras cannot write it.
    """
    if not isinstance(model, keras.Model):
        raise UnsupportedError(f"export: {form} needs a keras.Model, not a {type(model).__name__}.")
    try:
        _WRITERS[form](model, target, inputs)
    except ImportError as error:
        raise UnsupportedError(
            f"export: {form}: {error}. What ONNX needs comes with: pip install 'isotrain[onnx]'."
        ) from error
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"export: Keras cannot write this model as {form}: {error}"
        ) from error


def _export(kind: str, model: keras.Model, target: Path, inputs: Any | None) -> None:
    """Writes the model for inference, as ONNX or SavedModel."""
    model.export(target, kind, verbose=False, input_signature=_signature(model, inputs))


def _signature(model: keras.Model, inputs: Any | None) -> Any:
    """Input signature of the model with a free batch size; None if the inputs are unknown."""
    tensors = inputs
    if getattr(model, "inputs", None):  # a sequential model has one, and no `input`
        tensors = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return None if tensors is None else [keras.tree.map_structure(_spec, tensors)]


def _spec(tensor: Any) -> keras.InputSpec:
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return keras.InputSpec(dtype, (None, *tensor.shape[1:]), name=getattr(tensor, "name", None))


def _save(model: keras.Model, target: Path, inputs: Any | None) -> None:
    """Writes the whole model as a `.keras` file, which can be trained further."""
    with keras_private.without_tensorflow():
        model.save(target)


_WRITERS: Mapping[ExportForm, Callable[[Any, Path, Any], Any]] = {
    "keras": _save,
    "keras-weights": lambda model, target, inputs: model.save_weights(target),
    "onnx": functools.partial(_export, "onnx"),
    "saved-model": functools.partial(_export, "tf_saved_model"),
}


def read_keras_weights(path: Path, model: keras.Layer) -> dict[str, np.ndarray]:
    """Reads a `.weights.h5` or `.keras` file of a model of this structure.

    The file has no weight names: Keras matches weights by the types and the order of layers. Layers whose
    weights do not match the file's are left out.

    Returns:
        Arrays by canonical name; bfloat16 becomes float32.

    Raises:
        IsotrainError: The file cannot be read.
    """
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    names = dict(zip(map(id, variables), keras_model.canonical_names(variables), strict=True))
    weights: dict[str, np.ndarray] = {}

    def note(variable: Any, value: Any) -> None:
        name = names.get(id(variable))
        if name is not None:
            weights[name] = _as_numpy(value)

    try:
        with keras_private.intercept_assignments(note), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about layers left out, which the report lists
            model.load_weights(path, skip_mismatch=True)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise IsotrainError(f"initial_weights: {path} cannot be read: {error}") from error
    return weights


def _as_numpy(value: Any) -> np.ndarray:
    """NumPy array of a value's shape and dtype; float32 for bfloat16."""
    array = np.array(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
