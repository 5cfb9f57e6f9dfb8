"""Portable (Keras 3) models: what the adapters of every framework share.

The module that authors of backends get by the door: it gives what they need of the files beside it too.
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
from isotrain.adapters.common.resolve import resolve_for_framework
from isotrain.adapters.common.seeds import seed_offset
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
    """Sets Keras' numeric types for this process.

    In float64, Keras' type promotion is told to keep 64-bit results 64 bits wide: on torch it would
    otherwise compute matrix products and means in float32 without a word.
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
        spec: Gives the model function, the seed, the precision and the layers to compute again.
        framework: Whose entry of the spec is taken.
        scope: What to call the model function in; Keras is reset outside of it.
        recomputed: Makes of a function of tensors one that a backward pass computes again.

    Raises:
        SpecError: The function returned a Keras model that is not wholly built; statistics are to be
            frozen whose layer is not; or there is no layer of a name to compute again.
    """
    builder = resolve_for_framework(spec.model, framework, "model")
    keras.utils.clear_session(free_memory=False)
    configure_precision(spec.precision)  # Keras has just forgotten it
    with seeded_initial_weights(spec.seed), scope():
        model = builder(**spec.model_args)
    if isinstance(model, keras.Layer):
        _require_built(model)
        _freeze(model, spec)
        recompute(model, spec, recomputed)
    return model


def lock_trainable(model: Any) -> None:
    """Refuses from here on that somebody changes which weights of a Keras model are trained."""
    if isinstance(model, keras.Layer):
        keras_private.watch_trainable(_with_trainable(model), _refuse_change)


def unlock_trainable(model: Any) -> None:
    """Lets somebody change it again, after the run."""
    if isinstance(model, keras.Layer):
        keras_private.unwatch_trainable(_with_trainable(model))


def _with_trainable(model: keras.Layer) -> list[Any]:
    return [
        *keras_private.layers_of(model),
        *model.trainable_variables,
        *model.non_trainable_variables,
    ]


def _refuse_change(owner: Any) -> None:
    """Says what to do instead.

    Raises:
        SpecError: Always.
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
    """Freezes the weights that the spec names; layers all of whose weights these are, as a whole.

    Such a layer is in inference mode also in training: batch normalisation then uses the moving statistics
    that it has, and does not move them; and no dropout inside of it drops.
    """
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    names = canonical_names(variables)
    frozen = {id(v) for v, name in zip(variables, names, strict=True) if spec.is_frozen(name)}
    whole = [layer for layer in keras_private.layers_of(model) if _is_in(frozen, layer)]
    for layer in whole:
        layer.trainable = False
        for part in keras_private.layers_of(layer):
            _keep_in_inference(part)
    for variable in model.trainable_variables:
        if id(variable) in frozen:
            variable.trainable = False
    moved = {id(v) for v in moving_statistics(model)}
    still_moved = [n for v, n in zip(variables, names, strict=True) if id(v) in frozen & moved]
    if still_moved:
        raise SpecError(
            f"initial_weights.freeze: {', '.join(still_moved)}: a layer moves its statistics as long as it"
            " trains. Name its other weights too."
        )


def _keep_in_inference(layer: keras.Layer) -> None:
    """Has a layer called with `training=False`, whatever the call says."""
    call = layer.call
    if "training" not in inspect.signature(call).parameters:
        return

    @functools.wraps(call)
    def inference(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "training": False})

    layer.call = inference


def _is_in(frozen: Collection[int], layer: keras.Layer) -> bool:
    """Whether a layer has weights and all of them are frozen; its statistics, where it trains none."""
    others = [v for v in layer.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]
    weights = layer.trainable_variables or others
    return bool(weights) and all(id(variable) in frozen for variable in weights)


def _require_built(model: keras.Layer) -> None:
    """Refuses a model whose weights do not all exist yet: those would not be exchanged.

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
    """Calls `objective(model, (inputs, targets))` so that the model knows whether it is training.

    Sample weights, where data give them, are a third part of the pair. Inside a layer's call, Keras hands
    the `training` flag on to every layer called without one.
    """

    def __init__(self, objective: Callable[..., Any], model: Any) -> None:
        super().__init__(autocast=False)
        self._objective = objective
        self.model = model
        self.built = True

    def call(self, inputs: Any, targets: Any = None, training: bool | None = None) -> Any:
        """Returns what the objective gives: losses, or a pair of losses and predictions."""
        return self._objective(self.model, objective_batch(inputs, targets))


@dataclass(frozen=True)
class LossComputer:
    """A function from (inputs, targets) to the mean loss and the predictions.

    Attributes:
        compute: The function.
        callables: What it calls besides the model: the losses, or the objective.
        losses: By output; none where an objective gives them.
    """

    compute: Callable[[Any, Any], tuple[Any, Any]]
    callables: Sequence[Any]
    losses: keras_losses.Losses

    def __call__(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Gives the loss and the predictions."""
        return self.compute(inputs, targets)


def loss_computer(
    spec: TrainingSpec,
    model: Any,
    framework: str,
    training: bool,
    *,
    with_denominators: bool = False,
) -> LossComputer:
    """Makes the function from (inputs, targets) to the loss and the predictions.

    The losses of the model's own layers (regularisers, `add_loss`) are added to the mean.

    Args:
        spec: Gives the loss or objective.
        model: What is called.
        framework: Whose entry of the spec is taken.
        training: The mode in which the model is called.
        with_denominators: Whether to give the loss not as the mean but as
            `keras_losses.means_and_denominators` says, so that a slice with fewer places that count (masks,
            ignored classes) counts less in that of the global batch.
    """
    own_losses = LayerLosses(model)
    if spec.objective is not None:
        called = resolve_for_framework(spec.objective, framework, "objective")
        layer = ObjectiveLayer(called, model)

        def objective(inputs: Any, targets: Any) -> tuple[Any, Any]:
            given = layer(inputs, targets, training=training)
            losses, predictions = given if isinstance(given, tuple) else (given, None)
            return own_losses.add_to_loss(mean_over_samples(losses)), predictions

        return LossComputer(objective, [called], {})
    losses = keras_losses.build_output_losses(spec, framework)
    parts = keras_losses.loss_terms(losses, spec, OutputSelector.of_keras(model))
    reduced = (
        keras_losses.means_and_denominators if with_denominators else keras_losses.sum_of_means
    )
    takes_one = isinstance(model, keras.Sequential)

    def compute(inputs: Any, targets: Any) -> tuple[Any, Any]:
        if takes_one and isinstance(inputs, dict | tuple):
            raise SpecError(
                f"data: the inputs are a {type(inputs).__name__}, and the model is a keras.Sequential, which"
                " takes one array. Give it that array, or build a functional model with named inputs."
            )
        predictions = model(inputs, training=training)
        return reduced(parts(targets, predictions), own_losses.add_to_loss), predictions

    return LossComputer(compute, [each.loss for each in losses.values()], losses)


class LayerLosses:
    """The losses of a model's own layers: regularisers, and what they add while they are called."""

    def __init__(self, model: keras.Layer) -> None:
        self._model = model
        self._layers = keras_private.layers_of(model)
        self._regularised = any(v.regularizer is not None for v in model.trainable_variables)

    def add_to_loss(self, loss: Any) -> Any:
        """Adds them to a loss; costs next to nothing where there are none."""
        if self._regularised or keras_private.add_losses(self._layers):
            for extra in self._model.losses:
                loss = loss + keras.ops.cast(extra, loss.dtype)
        return loss


def moving_statistics(model: keras.Layer) -> list[Any]:
    """The floating-point weights that layers themselves move (batch normalisation's, for one).

    Weights that are merely frozen (`layer.trainable = False`) are not among them: nothing moves them.
    """
    layers = [each for each in keras_private.layers_of(model) if not _stands_still(each)]
    moved = {id(v) for layer in layers for v in keras_private.weights_updated_by(layer)}
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) in moved and keras.backend.is_float_dtype(variable.dtype)
    ]


def self_updating_weights(model: keras.Layer) -> list[Any]:
    """The weights that are layers' own to move, of any type; a frozen layer's among them."""
    moved = {
        id(v)
        for layer in keras_private.layers_of(model)
        for v in keras_private.weights_updated_by(layer)
    }
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) in moved or keras_private.is_seed(variable.path)
    ]


def _stands_still(layer: keras.Layer) -> bool:
    """Whether it is a layer of Keras' own that moves its statistics and, being frozen, does not."""
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.trainable


def canonical_names(variables: Sequence[Any]) -> list[str]:
    """Names variables by their Keras path, numbered where two would collide."""
    seen: dict[str, int] = {}
    names = []
    for variable in variables:
        path = variable.path
        count = seen.get(path, 0)
        seen[path] = count + 1
        names.append(path if count == 0 else f"{path}#{count}")
    return names
