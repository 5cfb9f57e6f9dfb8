"""Portable (Keras 3) models: building, losses, weight names. Shared by the adapters of every framework.

Backend authors import this module; it re-exports what they need from the modules beside it.
Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from isotrain.adapters.common.outputs import OutputSelector, objective_batch
from isotrain.adapters.common.seeds import seed_offset
from isotrain.adapters.common.spec_components import resolve_for_framework
from isotrain.adapters.keras import losses as keras_losses
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.initializers import seeded_initial_weights
from isotrain.adapters.keras.losses import mean_over_samples
from isotrain.adapters.keras.metrics import (
    build_losses,
    build_metrics,
    ensure_built,
    float64_results,
    inferred_accuracy,
    named_results,
    require_sums,
    sum_names,
    unbuilt_metrics,
    update_metrics,
)
from isotrain.adapters.keras.optimizers import (
    build_optimizer,
    loss_scale,
    loss_scale_variables,
    weight_finalizer,
)
from isotrain.adapters.keras.recompute import Recomputed, recompute
from isotrain.plugin import SpecError, TrainingSpec

__all__ = [
    "ObjectiveLayer",
    "LayerLosses",
    "build_losses",
    "build_metrics",
    "build_model",
    "build_optimizer",
    "unbuilt_metrics",
    "canonical_names",
    "configure_precision",
    "inferred_accuracy",
    "loss_computer",
    "loss_scale",
    "loss_scale_variables",
    "ensure_built",
    "mean_over_samples",
    "moving_statistics",
    "float64_results",
    "named_results",
    "require_sums",
    "seed_offset",
    "seeded_initial_weights",
    "resolve_for_framework",
    "sum_names",
    "update_metrics",
    "weight_finalizer",
]

_POLICIES = {
    "float32": "float32",
    "float64": "float64",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}


def configure_precision(precision: str) -> None:
    """Sets Keras' `floatx` and dtype policy for this process.

    With float64, Keras' type promotion is patched to keep 64-bit results: on torch it would otherwise
    silently compute matrix products and means in float32.
    """
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(_POLICIES[precision])
    if precision == "float64":
        keras_private.keep_float64()


def build_model(
    spec: TrainingSpec,
    framework: str,
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    recomputed: Recomputed = keras.remat,
) -> Any:
    """Calls the spec's model function with initial weights that depend on the seed alone.

    Args:
        spec: Training spec, for the model function, seed, precision, frozen weights and layers to recompute.
        framework: Framework whose model function is used, where the spec has one per framework.
        scope: Makes the context in which the model function is called, such as `strategy.scope`; Keras'
            global state is reset before it is entered.
        recomputed: Turns a function of tensors into one whose activations are recomputed in the backward
            pass (activation checkpointing).

    Raises:
        SpecError: The function returned a Keras model that is not fully built, `freeze` names moving
            statistics of a layer that still trains, or `recompute` names a layer that does not exist.
    """
    builder = resolve_for_framework(spec.model, framework, "model")
    keras.utils.clear_session(free_memory=False)
    configure_precision(spec.precision)  # clear_session has just reset it
    with seeded_initial_weights(spec.seed), scope():
        model = builder(**spec.model_args)
    if isinstance(model, keras.Layer):
        _require_built(model)
        _freeze(model, spec)
        recompute(model, spec, recomputed)
    return model


def lock_trainable(model: Any) -> None:
    """Makes every later change of `trainable` in a Keras model raise a `SpecError`, until it is unlocked."""
    if isinstance(model, keras.Layer):
        keras_private.watch_trainable(_with_trainable(model), _refuse_change)


def unlock_trainable(model: Any) -> None:
    """Allows `trainable` to change again, after the run."""
    if isinstance(model, keras.Layer):
        keras_private.unwatch_trainable(_with_trainable(model))


def _with_trainable(model: keras.Layer) -> list[Any]:
    return [
        *keras_private.layers_of(model),
        *model.trainable_variables,
        *model.non_trainable_variables,
    ]


def _refuse_change(owner: Any) -> None:
    """Refuses a change of `trainable` of a layer or variable.

    Raises:
        SpecError: Always; says what to do instead.
    """
    name = getattr(owner, "path", None) or owner.name
    raise SpecError(
        f"trainable: expected that {name!r} stays trainable={owner.trainable} as long as its run goes on,"
        f" received {not owner.trainable}: optimizer, exchange and steps are made for the weights that were"
        " trained at the start. Freeze weights by `initial_weights.freeze` in the spec; to change that on"
        " the way, end the run with a checkpoint, and go on with another one, by isotrain.resume(directory,"
        " spec=spec.replace(...)): weights that go on to be trained keep their slots."
    )


def _freeze(model: keras.Layer, spec: TrainingSpec) -> None:
    """Freezes the weights that the spec names, and each layer all of whose weights are named.

    A frozen layer is called in inference mode also during training: batch normalisation then uses its moving
    statistics and does not update them, and dropout inside of it is off.

    Raises:
        SpecError: Moving statistics are named whose layer is not frozen.
    """
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    names = canonical_names(variables)
    frozen = {id(v) for v, name in zip(variables, names, strict=True) if spec.is_frozen(name)}
    frozen_layers = [layer for layer in keras_private.layers_of(model) if _is_in(frozen, layer)]
    for layer in frozen_layers:
        layer.trainable = False
        for inner in keras_private.layers_of(layer):
            _keep_in_inference(inner)
    for variable in model.trainable_variables:
        if id(variable) in frozen:
            variable.trainable = False
    updated = {id(v) for v in moving_statistics(model)}
    still_updated = [n for v, n in zip(variables, names, strict=True) if id(v) in frozen & updated]
    if still_updated:
        raise SpecError(
            f"initial_weights.freeze: {', '.join(still_updated)}: a layer moves its statistics as long as it"
            " trains. Name its other weights too."
        )


def _keep_in_inference(layer: keras.Layer) -> None:
    """Wraps a layer's `call` so that it always runs with `training=False`."""
    call = layer.call
    if "training" not in inspect.signature(call).parameters:
        return

    @functools.wraps(call)
    def inference(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "training": False})

    layer.call = inference


def _is_in(frozen: Collection[int], layer: keras.Layer) -> bool:
    """Whether a layer has trainable weights (else floating-point statistics) and all of them are frozen."""
    statistics = [v for v in layer.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]
    weights = layer.trainable_variables or statistics
    return bool(weights) and all(id(variable) in frozen for variable in weights)


def _require_built(model: keras.Layer) -> None:
    """Refuses a model that is not fully built: weights created later would not be all-reduced.

    Raises:
        SpecError: A layer is not built.
    """
    unbuilt = [layer.name for layer in keras_private.layers_of(model) if not layer.built]
    if unbuilt:
        raise SpecError(
            f"model: the function returned a Keras model that is not (wholly) built; not built:"
            f" {', '.join(unbuilt[:5])}. Give the model an input shape (keras.Input), or call it on"
            " a sample before you return it, so that every weight exists when training starts."
        )


class ObjectiveLayer(keras.layers.Layer):
    """A layer that calls `objective(model, (inputs, targets))`, so that the model gets the `training` flag.

    Inside a layer's call, Keras passes the flag on to every layer called without one. Where the data have
    sample weights, the objective gets `(inputs, targets, sample_weights)`.
    """

    def __init__(self, objective: Callable[..., Any], model: Any) -> None:
        super().__init__(autocast=False)
        self._objective = objective
        self.model = model
        self.built = True

    def call(self, inputs: Any, targets: Any = None, training: bool | None = None) -> Any:
        """Returns the objective's result: losses (scalar or one per sample), or `(losses, predictions)`."""
        return self._objective(self.model, objective_batch(inputs, targets))


@dataclass(frozen=True)
class LossComputer:
    """A function from `(inputs, targets)` to `(loss, predictions)`; see `loss_computer` for the loss.

    Attributes:
        compute: The function itself.
        callables: Functions called besides the model: the losses, or the objective.
        losses: Losses by output name; empty with an objective.
    """

    compute: Callable[[Any, Any], tuple[Any, Any]]
    callables: Sequence[Any]
    losses: keras_losses.Losses

    def __call__(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Returns the loss and the predictions."""
        return self.compute(inputs, targets)


def loss_computer(
    spec: TrainingSpec,
    model: Any,
    framework: str,
    training: bool,
    *,
    with_denominators: bool = False,
) -> LossComputer:
    """Makes the function from `(inputs, targets)` to the loss and the predictions.

    The losses of the model's own layers (regularisers, `add_loss`) are added to the mean.

    Args:
        spec: Training spec, for the loss or the objective.
        model: Model to call.
        framework: Framework whose functions are used, where the spec has one per framework.
        training: The `training` flag of the model's calls.
        with_denominators: Whether to return the loss in the form of `keras_losses.means_and_denominators`
            instead of a scalar mean, so that a slice with fewer unmasked positions weighs less in the mean
            over the global batch. Objectives always return a scalar mean.
    """
    layer_losses = LayerLosses(model)
    if spec.objective is not None:
        function = resolve_for_framework(spec.objective, framework, "objective")
        layer = ObjectiveLayer(function, model)

        def objective(inputs: Any, targets: Any) -> tuple[Any, Any]:
            result = layer(inputs, targets, training=training)
            losses, predictions = result if isinstance(result, tuple) else (result, None)
            return layer_losses.add_to_loss(mean_over_samples(losses)), predictions

        return LossComputer(objective, [function], {})
    losses = keras_losses.build_output_losses(spec, framework)
    terms = keras_losses.loss_terms(losses, spec, OutputSelector.of_keras(model))
    reduce_terms = (
        keras_losses.means_and_denominators if with_denominators else keras_losses.sum_of_means
    )
    has_one_input = isinstance(model, keras.Sequential)

    def compute(inputs: Any, targets: Any) -> tuple[Any, Any]:
        if has_one_input and isinstance(inputs, dict | tuple):
            raise SpecError(
                f"data: the inputs are a {type(inputs).__name__}, and the model is a keras.Sequential, which"
                " takes one array. Give it that array, or build a functional model with named inputs."
            )
        predictions = model(inputs, training=training)
        return reduce_terms(terms(targets, predictions), layer_losses.add_to_loss), predictions

    return LossComputer(compute, [each.loss for each in losses.values()], losses)


class LayerLosses:
    """The losses of a model's own layers: weight regularisers, and `add_loss` in the forward pass."""

    def __init__(self, model: keras.Layer) -> None:
        self._model = model
        self._layers = keras_private.layers_of(model)
        self._regularised = any(v.regularizer is not None for v in model.trainable_variables)

    def add_to_loss(self, loss: Any) -> Any:
        """Returns a scalar loss plus the layers' losses; nearly free where there are none."""
        if self._regularised or keras_private.have_added_losses(self._layers):
            for extra in self._model.losses:
                loss = loss + keras.ops.cast(extra, loss.dtype)
        return loss


def moving_statistics(model: keras.Layer) -> list[Any]:
    """The floating-point weights that layers update in the forward pass, such as batch normalisation's.

    Frozen weights (`layer.trainable = False`) are not included: nothing updates them.
    """
    layers = [each for each in keras_private.layers_of(model) if not _stands_still(each)]
    updated = {id(v) for layer in layers for v in keras_private.weights_updated_by(layer)}
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) in updated and keras.backend.is_float_dtype(variable.dtype)
    ]


def self_updating_weights(model: keras.Layer) -> list[Any]:
    """The weights that layers update themselves, of any dtype, seed states and frozen layers' included."""
    updated = {
        id(v)
        for layer in keras_private.layers_of(model)
        for v in keras_private.weights_updated_by(layer)
    }
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) in updated or keras_private.is_seed(variable.path)
    ]


def _stands_still(layer: keras.Layer) -> bool:
    """Whether a layer is a frozen batch normalisation, whose moving statistics are not updated."""
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.trainable


def canonical_names(variables: Sequence[Any]) -> list[str]:
    """Keras paths of variables, in order; `#1`, `#2`, ... is appended to repeated paths."""
    seen: dict[str, int] = {}
    names = []
    for variable in variables:
        path = variable.path
        count = seen.get(path, 0)
        seen[path] = count + 1
        names.append(path if count == 0 else f"{path}#{count}")
    return names
