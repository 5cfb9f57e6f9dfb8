"""Which weights a model has, which of them are trained, and which it moves itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.keras import carried_state as keras_carried_state
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.tensorflow.trainer.state import canonical_names, native
from isotrain.plugin import SpecError, TrainingSpec


def require_precision(model: Any, precision: str) -> None:
    """Refuses mixed precision for a model that would ignore it.

    Raises:
        SpecError: It is a plain tf.Module.
    """
    if precision in ("bfloat16", "float16") and not isinstance(model, keras.Layer):
        raise SpecError(
            f"precision: a tf.Module computes in the types of its own variables, and {precision!r}"
            " cannot be given to it. Use a Keras model, or float32."
        )


def moving_statistics(model: Any) -> list[Any]:
    """The weights that a model moves without training them."""
    if isinstance(model, keras.Layer):
        return keras_model.moving_statistics(model)
    return [variable for variable in _of_module(model)[1] if variable.dtype.is_floating]


def self_updating(model: Any, others: Sequence[Any]) -> list[Any]:
    """The weights that a model moves itself, or may move, also in evaluation mode; seeds among them."""
    return (
        keras_model.self_updating_weights(model) if isinstance(model, keras.Layer) else list(others)
    )


def carried_variables(model: Any) -> dict[str, tf.Variable]:
    """The variables that layers of a Keras model keep and that are none of its weights, by name."""
    if not isinstance(model, keras.Layer):
        return {}
    found = {n: native(v) for n, v in keras_carried_state.carried_variables(model).items()}
    known = {id(native(each)) for each in (*model.variables, *found.values())}
    of_framework = keras_carried_state.carried(model, tf.Variable)
    return found | {name: each for name, each in of_framework if id(each) not in known}


def weights_of(model: Any, spec: TrainingSpec) -> tuple[list[Any], list[Any]]:
    """A model's trainable weights, and its others, among which are those that the spec freezes.

    Raises:
        SpecError: TensorFlow cannot train it.
    """
    if isinstance(model, keras.Layer):
        return list(model.trainable_variables), list(model.non_trainable_variables)
    if isinstance(model, tf.Module):
        return _thawed(*_of_module(model), spec)
    raise SpecError(
        f"model: the function returned {type(model).__name__!r}; a tensorflow backend trains a"
        " Keras model or a tf.Module."
    )


def _of_module(model: tf.Module) -> tuple[list[Any], list[Any]]:
    trainable = list(model.trainable_variables)
    known = {id(variable) for variable in trainable}
    return trainable, [v for v in model.variables if id(v) not in known]


def _thawed(
    trainable: list[Any], others: list[Any], spec: TrainingSpec
) -> tuple[list[Any], list[Any]]:
    """Counts the trainable weights that the spec freezes among the others.

    Raises:
        SpecError: Weights are to be frozen that the module may move itself.
    """
    names = canonical_names([*trainable, *others])
    frozen = [spec.is_frozen(name) for name in names]
    moved = [n for n, own in zip(names, frozen, strict=True) if own][
        sum(frozen[: len(trainable)]) :
    ]
    if moved:
        raise SpecError(
            f"initial_weights.freeze: {', '.join(moved)}: a tf.Module moves its untrained weights itself."
            " Leave them out."
        )
    marked = list(zip(trainable, frozen, strict=False))
    still = [variable for variable, own in marked if own]
    return [variable for variable, own in marked if not own], [*others, *still]
