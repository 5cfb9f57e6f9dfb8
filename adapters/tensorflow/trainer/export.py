"""Export of trained models: SavedModel and Keras' file formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.keras import files as keras_files
from isotrain.plugin import ExportForm, SpecError, UnsupportedError


def write(
    model: Any, form: ExportForm, target: Path, inputs: Any | None, call: Callable[[Any], Any]
) -> None:
    """Writes a Keras model, or a tf.Module.

    Args:
        model: Model to write.
        form: Format to write it in.
        target: Path of the file or folder.
        inputs: A few samples' inputs, shape `[samples, ...]` each; None where they are not known.
        call: Function from inputs to predictions in evaluation mode, for a tf.Module.

    Raises:
        UnsupportedError: The model cannot be written in this format.
        SpecError: The inputs are needed, and not known.
    """
    if isinstance(model, keras.Layer):
        keras_files.write(model, form, target, inputs)
        return
    if form != "saved-model":
        raise UnsupportedError(
            f"export: a tf.Module cannot be written as {form!r}; available: saved-model, safetensors."
        )
    if inputs is None:
        raise SpecError(
            "export: a SavedModel of a tf.Module needs samples of its inputs. Give data=..."
            " (--data on the command line)."
        )
    _write_module(model, target, inputs, call)


def _write_module(model: tf.Module, target: Path, inputs: Any, call: Callable[[Any], Any]) -> None:
    """Saves the module with a signature for any number of samples."""
    input_specs = tf.nest.map_structure(
        lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), inputs
    )
    traced = tf.function(call, input_signature=[input_specs])
    tf.saved_model.save(model, str(target), signatures=_serving_signature(traced, input_specs))


def _serving_signature(call: Any, input_specs: Any) -> Any:
    """The call as a signature, which returns outputs by name."""

    @tf.function(input_signature=[input_specs])
    def serve(inputs: Any) -> Any:
        outputs = call(inputs)
        return outputs if isinstance(outputs, dict) else {"outputs": outputs}

    return serve
