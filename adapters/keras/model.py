"""Portable (Keras 3) models: building, initial weights, losses. Shared by the adapters of every framework.

Backend authors import this module; it re-exports what they need from the modules beside it.
Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import contextlib
import functools
import random as python_random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from isotrain.adapters.common.model_call import model_call
from isotrain.adapters.common.objective import Objective
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.common.seeds import seed_offset
from isotrain.adapters.common.spec_components import resolve_for_framework
from isotrain.adapters.keras import losses as keras_losses
from isotrain.adapters.keras import private as keras_private
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
from isotrain.adapters.keras.model_dict import ModelDict
from isotrain.adapters.keras.optimizers import (
    build_optimizer,
    global_norm,
    loss_scale,
    loss_scale_variables,
    momentum_option,
    momentum_setter,
    use_groups,
    weight_finalizer,
)
from isotrain.adapters.keras.recompute import Recomputed, recompute
from isotrain.adapters.keras.weights import canonical_names, freeze, moving_statistics
from isotrain.plugin import FrozenModel, SpecError, TrainingSpec

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
    "keras_call",
    "loss_computer",
    "loss_scale",
    "loss_scale_variables",
    "ensure_built",
    "mean_over_samples",
    "moving_statistics",
    "float64_results",
    "freeze_model",
    "global_norm",
    "named_results",
    "require_sums",
    "seed_offset",
    "seeded_initial_weights",
    "resolve_for_framework",
    "sum_names",
    "update_metrics",
    "momentum_option",
    "momentum_setter",
    "use_groups",
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
    has_values: bool = True,
) -> Any:
    """Calls the spec's model function with initial weights that depend on the seed alone.

    Args:
        spec: Training spec, for the model function, seed, precision, frozen weights and layers to recompute.
        framework: Framework whose model function is used, where the spec has one per framework.
        scope: Makes the context in which the model function is called, such as `strategy.scope`; Keras'
            global state is reset before it is entered.
        recomputed: Turns a function of tensors into one whose activations are recomputed in the backward
            pass (activation checkpointing).
        has_values: Whether weights have values; else the framework makes them, in a context in which they
            take no memory.

    Raises:
        SpecError: The function returned a Keras model that is not fully built or trains in float8, `freeze`
            names moving statistics of a layer that still trains, or `recompute` names a layer that does not
            exist.
    """
    builder = resolve_for_framework(spec.model, framework, "model")
    keras.utils.clear_session(free_memory=False)
    configure_precision(spec.precision)  # clear_session has just reset it
    seeded = seeded_initial_weights(spec.seed) if has_values else contextlib.nullcontext()
    with seeded, scope():
        model = builder(**spec.model_args)
        if isinstance(model, Mapping) and any(isinstance(m, keras.Layer) for m in model.values()):
            model = ModelDict(model)
    if isinstance(model, keras.Layer):
        _require_built(model)
        freeze(model, spec.is_frozen)
        _require_no_float8(model)
        recompute(model, spec, recomputed)
    return model


def freeze_model(model: keras.Layer, frozen: FrozenModel) -> Callable[..., Any]:
    """Loads the weights of a frozen model, and makes them constant; returns its call in evaluation mode."""
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    named = zip(canonical_names(variables), variables, strict=True)
    weights = {name: each for name, each in named if not keras_private.is_seed(each.path)}
    frozen.load(weights, lambda variable, array: variable.assign(array))
    model.trainable = False
    return functools.partial(model, training=False)


def _require_built(model: keras.Layer) -> None:
    """Refuses a model that is not fully built: weights created later would not be all-reduced.

    Raises:
        SpecError: A layer is not built.
    """
    lookups = keras.layers.StringLookup, keras.layers.IntegerLookup
    unbuilt = [
        layer.name
        for layer in keras_private.layers_of(model)
        # a lookup layer has a table and no weights, and that of a TextVectorization is never built
        if not layer.built and not isinstance(layer, lookups)
    ]
    if unbuilt:
        raise SpecError(
            f"model: the function returned a Keras model that is not (wholly) built; not built:"
            f" {', '.join(unbuilt[:5])}. Give the model an input shape (keras.Input), or call it on"
            " a sample before you return it, so that every weight exists when training starts."
        )


def _require_no_float8(model: keras.Layer) -> None:
    """Refuses layers in float8: their scales follow the largest values that a replica's own samples have.

    Raises:
        SpecError: The gradients of some weights are their new values.
    """
    scales = [
        variable.path
        for variable in model.trainable_variables
        if getattr(variable, "overwrite_with_gradient", False)
    ]
    if scales:
        raise SpecError(
            f"model: layers in float8: Keras replaces {', '.join(scales[:3])} by their gradients, which come"
            " from the largest values of a replica's own samples; a mean over replicas is another number."
            " Leave the float8 policy of these layers out; `precision: bfloat16` takes half of the memory of"
            " float32."
        )


@contextlib.contextmanager
def seeded_initial_weights(seed: int) -> Iterator[None]:
    """Context in which Keras' initializers draw the same numbers on every framework.

    Initializers take their seeds from Python's `random`, seeded here, and their draws from NumPy's PCG64
    (float64, then cast to the weight's dtype) in place of the framework's generator.
    """
    draws = {"normal": _normal, "uniform": _uniform, "truncated_normal": _truncated_normal}
    state = python_random.getstate()
    python_random.seed(seed)
    by_numpy = {name: functools.partial(_drawn_by_numpy, draw) for name, draw in draws.items()}
    try:
        with keras_private.replaced_initializer_draws(by_numpy):
            yield
    finally:
        python_random.setstate(state)


def _drawn_by_numpy(draw: Callable[..., np.ndarray], original: Callable[..., Any]) -> Any:
    """Keras random function that draws by NumPy's PCG64 where the seed is a number and the shape is known."""

    def function(
        shape: Sequence[int], *args: Any, dtype: Any = None, seed: Any = None, **options: Any
    ) -> Any:
        if not isinstance(seed, int) or any(map(keras.ops.is_tensor, keras.tree.flatten(shape))):
            return original(shape, *args, dtype=dtype, seed=seed, **options)
        generator = np.random.Generator(np.random.PCG64(seed & 0xFFFFFFFF))
        values = draw(generator, tuple(shape), *args, **options)
        return keras.ops.convert_to_tensor(values, dtype=dtype or keras.config.floatx())

    return function


def _normal(
    generator: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0, stddev: float = 1.0
) -> np.ndarray:
    """Normal float64 numbers of a shape."""
    return mean + stddev * generator.standard_normal(shape)


def _uniform(
    generator: np.random.Generator,
    shape: tuple[int, ...],
    minval: float = 0.0,
    maxval: float = 1.0,
) -> np.ndarray:
    """Uniform float64 numbers in [minval, maxval), of a shape."""
    return minval + (maxval - minval) * generator.random(shape)


def _truncated_normal(
    generator: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0, stddev: float = 1.0
) -> np.ndarray:
    """Float64 draws within two standard deviations of the mean, by rejection sampling."""
    values = np.asarray(generator.standard_normal(shape))
    while (outside := np.abs(values) > 2.0).any():
        values[outside] = generator.standard_normal(int(outside.sum()))
    return mean + stddev * values


class ObjectiveLayer(keras.layers.Layer):
    """A layer that calls the objective, so that the model gets the `training` flag.

    Inside a layer's call, Keras passes the flag on to every layer called without one.
    """

    def __init__(self, objective: Objective, model: Any) -> None:
        super().__init__(autocast=False)
        self._objective = objective
        self.model = model
        self.built = True

    def call(self, inputs: Any, targets: Any = None, training: bool | None = None) -> Any:
        """Returns what the objective returns: losses, or `(losses, predictions)`."""
        return self._objective(self.model, inputs, targets, bool(training))


class CallLayer(keras.layers.Layer):
    """A layer that calls the spec's `call(model, inputs)`, so that the model gets the `training` flag."""

    def __init__(self, call: Callable[..., Any], model: Any) -> None:
        super().__init__(autocast=False)
        self._call = call
        self.model = model
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the predictions."""
        return self._call(inputs, training=training)


def keras_call(spec: TrainingSpec, framework: str, model: Any) -> Callable[..., Any]:
    """The function `(inputs, training=...)` to predictions: the model, or as the spec's `call` says."""
    return model if spec.call is None else CallLayer(model_call(spec, framework, model), model)


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
    objective: Objective | None = None,
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
            over the global batch.
        objective: The spec's objective with the step of the replica; None for a backend without steps.
    """
    layer_losses = LayerLosses(model)
    reduce_terms = (
        keras_losses.means_and_denominators if with_denominators else keras_losses.sum_of_means
    )
    if objective := objective or Objective.of(spec, framework):
        layer = ObjectiveLayer(objective, model)

        def compute_objective(inputs: Any, targets: Any) -> tuple[Any, Any]:
            result = objective.result(layer(inputs, targets, training=training))
            terms = keras_losses.objective_terms(objective, result)
            return reduce_terms(terms, layer_losses.add_to_loss), result.predictions

        return LossComputer(compute_objective, [objective.function], {})
    losses = keras_losses.build_output_losses(spec, framework)
    terms = keras_losses.loss_terms(losses, spec, OutputSelector.of_keras(model))
    has_one_input = isinstance(model, keras.Sequential) and spec.call is None
    call = keras_call(spec, framework, model)

    def compute(inputs: Any, targets: Any) -> tuple[Any, Any]:
        if has_one_input and isinstance(inputs, dict | tuple):
            raise SpecError(
                f"data: the inputs are a {type(inputs).__name__}, and the model is a keras.Sequential, which"
                " takes one array. Give it that array, or build a functional model with named inputs."
            )
        predictions = call(inputs, training=training)
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
