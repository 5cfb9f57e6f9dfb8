"""Weights in Keras' own files. Imported by adapters only after `keras_backend.claim`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

from isotrain.adapters import keras_private, portable
from isotrain.plugin import IsotrainError


def weights_of_keras(path: Path, model: keras.Layer) -> dict[str, np.ndarray]:
    """Reads a `.weights.h5` or `.keras` file of a model of this structure, by the model's names.

    The file has no names of its own: Keras finds weights by the kinds and the order of layers. Layers
    with other weights than the file's are left out.

    Raises:
        IsotrainError: It cannot be read.
    """
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    names = dict(zip(map(id, variables), portable.canonical_names(variables), strict=True))
    found: dict[str, np.ndarray] = {}

    def note(variable: Any, value: Any) -> None:
        name = names.get(id(variable))
        if name is not None:
            found[name] = _as_numpy(value)

    try:
        with keras_private.assignments(note), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that are left out, which the report lists
            model.load_weights(path, skip_mismatch=True)
    except (OSError, ValueError, KeyError) as error:
        raise IsotrainError(f"initial_weights: {path} cannot be read: {error}") from error
    return found


def _as_numpy(value: Any) -> np.ndarray:
    array = np.array(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
