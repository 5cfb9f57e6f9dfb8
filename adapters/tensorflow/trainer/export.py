"""TensorFlow's models in forms that others open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.keras import files as keras_files
from isotrain.adapters.tensorflow.trainer.loss import forward
from isotrain.plugin import ExportForm, SpecError, UnsupportedError


def write(model: Any, form: ExportForm, target: Path, inputs: Any | None) -> None:
    """Writes a Keras model, or a tf.Module.

    Args:
        model: What to write.
        form: In which form.
        target: The file or folder.
        inputs: Of a few samples; None where they are not known.

    Raises:
        UnsupportedError: It has no such form.
        SpecError: The inputs are needed, and not known.
    """
    if isinstance(model, keras.Layer):
        keras_files.write(model, form, target, inputs)
        return
    if form != "saved-model":
        raise UnsupportedError(
            f"export: a tf.Module has no form {form!r}; it has saved-model and safetensors."
        )
    if inputs is None:
        raise SpecError(
            "export: for a SavedModel of a tf.Module, samples of its inputs are needed. Give data=..."
            " (--data on the command line)."
        )
    _write_module(model, target, inputs)


def _write_module(model: tf.Module, target: Path, inputs: Any) -> None:
    """Saves the module with a signature for any number of samples."""
    given = tf.nest.map_structure(
        lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), inputs
    )
    called = tf.function(forward(model, training=False), input_signature=[given])
    tf.saved_model.save(model, str(target), signatures=_named(called, given))


def _named(called: Any, given: Any) -> Any:
    """The call as a signature, which gives outputs by name."""

    @tf.function(input_signature=[given])
    def serve(inputs: Any) -> Any:
        outputs = called(inputs)
        return outputs if isinstance(outputs, dict) else {"outputs": outputs}

    return serve
