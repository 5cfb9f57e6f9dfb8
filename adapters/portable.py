"""Portable (Keras 3) models: what the adapters of every framework share.

Imported by adapters only after `keras_backend.claim`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random as python_random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from isotrain.adapters import called, keras_private
from isotrain.plugin import (
    Component,
    CustomOptimizer,
    SpecError,
    TrainingSpec,
    UnsupportedError,
    references,
    unknown_name,
)

Loss = Callable[[Any, Any], Any]
"""`loss(targets, predictions)`: a scalar mean over the samples, or one value per sample."""

_POLICIES = {
    "float32": "float32",
    "float64": "float64",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}
SEED_STRIDE = 0x9E3779B1
"""Odd, so that adding multiples of it to a 32-bit seed keeps replicas' seeds apart."""
_CLIPPING = {"value": "clipvalue", "norm": "clipnorm", "global_norm": "global_clipnorm"}
_SPEC_ONLY_FIELDS = {"name", "lr", "custom", "args"}


def configure_precision(precision: str) -> None:
    """Sets Keras' numeric types for this process.

    In float64, Keras' type promotion is told to keep 64-bit results 64 bits wide: on torch it would
    otherwise compute matrix products and means in float32 without a word.
    """
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(_POLICIES[precision])
    if precision == "float64":
        keras_private.keep_64_bits()


def select(given: Any, framework: str, field: str) -> Any:
    """Picks this framework's entry where the spec gives one per framework, and imports it.

    Raises:
        SpecError: Nothing is given for this framework, or it cannot be imported.
    """
    if isinstance(given, Mapping):
        if framework not in given:
            raise SpecError(
                f"{field}: nothing is given for the framework {framework!r}; given for:"
                f" {', '.join(sorted(given))}."
            )
        given = given[framework]
    return references.resolve(given)


def build_model(
    spec: TrainingSpec,
    framework: str,
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Any:
    """Calls the spec's model function with initial weights that depend on the seed alone.

    Args:
        spec: Gives the model function, the seed and the precision.
        framework: Whose entry of the spec is taken.
        scope: What to call the model function in; Keras is reset outside of it.

    Raises:
        SpecError: The function returned a Keras model that is not wholly built.
    """
    builder = select(spec.model, framework, "model")
    keras.utils.clear_session(free_memory=False)
    configure_precision(spec.precision)  # Keras has just forgotten it
    with seeded_initial_weights(spec.seed), scope():
        model = builder(**spec.model_args)
    if isinstance(model, keras.Layer):
        _require_built(model)
    return model


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


@contextlib.contextmanager
def seeded_initial_weights(seed: int) -> Iterator[None]:
    """Makes Keras' initializers draw the same numbers on every framework.

    Initializers take their seeds from Python's generator, seeded here, and their draws from NumPy
    (float64, then rounded to the weight's type) in place of the framework's generator.
    """
    draws = {"normal": _normal, "uniform": _uniform, "truncated_normal": _truncated_normal}
    state = python_random.getstate()
    python_random.seed(seed)
    by_numpy = {name: functools.partial(_drawn_by_numpy, draw) for name, draw in draws.items()}
    try:
        with keras_private.initial_draws(by_numpy):
            yield
    finally:
        python_random.setstate(state)


def _drawn_by_numpy(draw: Callable[..., np.ndarray], original: Callable[..., Any]) -> Any:
    def function(
        shape: Sequence[int], *args: Any, dtype: Any = None, seed: Any = None, **options: Any
    ) -> Any:
        if not isinstance(seed, int):
            return original(shape, *args, dtype=dtype, seed=seed, **options)
        generator = np.random.Generator(np.random.PCG64(seed & 0xFFFFFFFF))
        values = draw(generator, tuple(shape), *args, **options)
        return keras.ops.convert_to_tensor(values, dtype=dtype or keras.config.floatx())

    return function


def _normal(
    generator: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0, stddev: float = 1.0
) -> np.ndarray:
    return mean + stddev * generator.standard_normal(shape)


def _uniform(
    generator: np.random.Generator,
    shape: tuple[int, ...],
    minval: float = 0.0,
    maxval: float = 1.0,
) -> np.ndarray:
    return minval + (maxval - minval) * generator.random(shape)


def _truncated_normal(
    generator: np.random.Generator, shape: tuple[int, ...], mean: float = 0.0, stddev: float = 1.0
) -> np.ndarray:
    """Draws within two standard deviations of the mean; those outside are drawn again."""
    values = np.asarray(generator.standard_normal(shape))
    while (outside := np.abs(values) > 2.0).any():
        values[outside] = generator.standard_normal(int(outside.sum()))
    return mean + stddev * values


def build_optimizer(spec: TrainingSpec, framework: str) -> keras.optimizers.Optimizer:
    """Makes the spec's Keras optimizer, with its clipping and, in float16, its loss scaling.

    It must be given gradients that are already reduced over the replicas: it clips what it is given.
    In float64, hyperparameters are rounded to float32 first, because TensorFlow passes Python
    numbers through float32 and the frameworks would part there.
    """
    settings = spec.optimizer
    number = float if spec.precision != "float64" else _through_float32
    if isinstance(settings, CustomOptimizer):
        factory = select(settings.custom, framework, "optimizer.custom")
        optimizer = factory(number(settings.lr), **settings.args)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise SpecError(
                f"optimizer.custom: it returned {type(optimizer).__name__!r}; for this model it must"
                " return a Keras optimizer, from (learning_rate, **args)."
            )
    else:
        optimizer = _named_optimizer(spec, number)
    if spec.clip is not None:
        for field, attribute in _CLIPPING.items():
            bound = getattr(spec.clip, field)
            setattr(optimizer, attribute, None if bound is None else number(bound))
    if spec.loss_scaling is not None:
        return keras.optimizers.LossScaleOptimizer(
            optimizer,
            initial_scale=spec.loss_scaling.initial,
            dynamic_growth_steps=spec.loss_scaling.growth_steps,
        )
    return optimizer


def _named_optimizer(
    spec: TrainingSpec, number: Callable[[float], float]
) -> keras.optimizers.Optimizer:
    classes = {
        cls.__name__.lower(): cls
        for cls in (
            keras.optimizers.SGD,
            keras.optimizers.Adam,
            keras.optimizers.AdamW,
            keras.optimizers.RMSprop,
            keras.optimizers.Adagrad,
            keras.optimizers.Lamb,
        )
    }
    settings = spec.optimizer
    options = {
        name: number(value) if isinstance(value, float) else value
        for name, value in settings.model_dump(exclude=_SPEC_ONLY_FIELDS).items()
    }
    if (
        not settings.decay_is_decoupled
    ):  # Keras' AdamW takes 0 but not None, the others None but not 0
        options["weight_decay"] = options["weight_decay"] or None
    return classes[settings.name](learning_rate=number(settings.lr), **options)


def _through_float32(value: float) -> float:
    return float(np.float32(value))


def build_loss(spec: TrainingSpec, framework: str, squeeze: bool = True) -> Loss:
    """Makes the spec's loss: a Keras loss by name, or the person's own callable.

    Args:
        spec: Names it.
        framework: Whose entry of the spec is taken.
        squeeze: Whether a callable gets targets and predictions without a last axis of length 1 that only
            one of them has, as Keras' own losses do; without it they are refused.
    """
    return _component(spec.loss, framework, "loss", _loss_classes(), squeeze)


def build_metrics(spec: TrainingSpec, framework: str) -> list[keras.metrics.Metric]:
    """Makes the spec's metrics anew: Keras metrics by name, or the mean of a callable's values."""
    metrics = []
    for given in spec.metrics:
        if given.name in ("accuracy", "acc"):
            metrics.append(keras.metrics.MeanMetricWrapper(inferred_accuracy, name=given.name))
            continue
        metric = _component(given, framework, "metrics", _metric_classes())
        if not isinstance(metric, keras.metrics.Metric):
            metric = keras.metrics.MeanMetricWrapper(metric, name=given.label.rpartition(":")[2])
        metrics.append(metric)
    names = [metric.name for metric in metrics]
    double = sorted({name for name in names if names.count(name) > 1 or name == "loss"})
    if double:
        raise SpecError(
            f"metrics: more than one result would be called {', '.join(double)} (the loss is always"
            " given as `loss`). Give one of them another name: the option `name`, or a callable of"
            " your own."
        )
    return metrics


def built_late(metrics: Iterable[keras.metrics.Metric]) -> list[str]:
    """The names of metrics that make their variables when they see the first samples."""
    return [metric.name for metric in metrics if not keras_private.is_built(metric)]


def require_sums(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Makes sure that metrics have the variables that others' sums can be added to.

    Raises:
        UnsupportedError: One makes its variables when it sees the first samples.
    """
    late = built_late(metrics)
    if late:
        raise UnsupportedError(
            f"metrics: {', '.join(late)} makes its variables when it sees samples, and so cannot be"
            " added up over the workers of a served run. Leave it out, or give a function of your own,"
            " whose values are averaged."
        )


def update_metrics(metrics: Sequence[keras.metrics.Metric], targets: Any, predictions: Any) -> None:
    """Adds samples to metrics.

    Raises:
        SpecError: There are metrics, and an objective that gave no predictions.
    """
    if metrics and predictions is None:
        raise SpecError(
            "metrics: they need predictions, and the objective gave losses only. Let it return the"
            " pair (losses, predictions), or leave the metrics out."
        )
    for metric in metrics:
        metric.update_state(targets, predictions)


def inferred_accuracy(targets: Any, predictions: Any) -> Any:
    """Accuracy whose kind (binary, categorical, sparse categorical) follows from the shapes."""
    if len(predictions.shape) == 1:
        targets, predictions = keras.ops.reshape(targets, (-1, 1)), predictions[:, None]
    if predictions.shape[-1] == 1:
        return keras.metrics.binary_accuracy(targets, predictions)
    sparse = len(targets.shape) < len(predictions.shape) or targets.shape[-1] == 1
    if sparse:
        return keras.metrics.sparse_categorical_accuracy(targets, predictions)
    return keras.metrics.categorical_accuracy(targets, predictions)


def _component(
    given: Any, framework: str, field: str, classes: Mapping[str, type], squeeze: bool = True
) -> Any:
    """Makes a loss or metric from a Keras name, or from the person's own callable or class."""
    chosen: Component = select(given, framework, field)
    if not chosen.is_reference:
        return _constructed(_named(chosen.name, field, classes), chosen, field)
    found = references.resolve(chosen.name)
    if isinstance(found, type):
        found = _constructed(found, chosen, field)
    elif chosen.options:
        found = functools.partial(found, **chosen.options)
    if isinstance(found, keras.losses.Loss | keras.metrics.Metric):
        return found
    function = called.arranged(found, chosen.order, field)
    return called.aligned(function, f"{field}: {chosen.label!r}", squeeze)


def _named(name: str, field: str, classes: Mapping[str, type]) -> type:
    """The Keras class of that name; abbreviations such as `mse` stand for functions named as a class."""
    if name in classes:
        return classes[name]
    with contextlib.suppress(ValueError):
        full = getattr(keras.losses.get(name), "__name__", "")
        if full in classes:
            return classes[full]
    raise SpecError(f"{field}: " + unknown_name(f"Keras {field} name", name, classes))


def _constructed(cls: type, chosen: Component, field: str) -> Any:
    options = dict(chosen.options)
    name = inspect.signature(cls).parameters.get("name")
    if name is not None and name.default is None:  # Keras would count: auc, auc_1, ...
        options.setdefault("name", keras_private.snake_case(cls.__name__))
    try:
        return cls(**options)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"{field}: {chosen.label!r} refuses the options {chosen.options}: {error}"
        ) from error


def _loss_classes() -> dict[str, type]:
    return _by_every_name(vars(keras.losses).values(), keras.losses.Loss)


def _metric_classes() -> dict[str, type]:
    return _by_every_name(vars(keras.metrics).values(), keras.metrics.Metric)


def _by_every_name(objects: Iterable[Any], base: type) -> dict[str, type]:
    """Class names and their snake-case forms, for the concrete subclasses of `base`."""
    classes = {
        item.__name__: item
        for item in objects
        if isinstance(item, type) and issubclass(item, base) and item is not base
    }
    snake = {keras_private.snake_case(name): cls for name, cls in classes.items()}
    return {**snake, **classes}


class ObjectiveLayer(keras.layers.Layer):
    """Calls `objective(model, (inputs, targets))` so that the model knows whether it is training.

    Inside a layer's call, Keras hands the `training` flag on to every layer called without one.
    """

    def __init__(self, objective: Callable[..., Any], model: Any) -> None:
        super().__init__(autocast=False)
        self._objective = objective
        self.model = model
        self.built = True

    def call(self, inputs: Any, targets: Any = None, training: bool | None = None) -> Any:
        """Returns what the objective gives: losses, or a pair of losses and predictions."""
        return self._objective(self.model, (inputs, targets))


def loss_computer(
    spec: TrainingSpec, model: Any, framework: str, training: bool
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Makes the function from (inputs, targets) to the mean loss and the predictions.

    The losses of the model's own layers (regularisers, `add_loss`) are added to the mean.
    """
    own_losses = OwnLosses(model)
    if spec.objective is not None:
        layer = ObjectiveLayer(select(spec.objective, framework, "objective"), model)

        def objective(inputs: Any, targets: Any) -> tuple[Any, Any]:
            given = layer(inputs, targets, training=training)
            losses, predictions = given if isinstance(given, tuple) else (given, None)
            return own_losses.added_to(mean_over_samples(losses)), predictions

        return objective
    loss = build_loss(spec, framework)

    def compute(inputs: Any, targets: Any) -> tuple[Any, Any]:
        predictions = model(inputs, training=training)
        mean = mean_over_samples(loss(targets, predictions))
        return own_losses.added_to(mean), predictions

    return compute


class OwnLosses:
    """The losses of a model's own layers: regularisers, and what they add while they are called."""

    def __init__(self, model: keras.Layer) -> None:
        self._model = model
        self._layers = keras_private.layers_of(model)
        self._regularised = any(v.regularizer is not None for v in model.trainable_variables)

    def added_to(self, loss: Any) -> Any:
        """Adds them to a loss; costs next to nothing where there are none."""
        if self._regularised or keras_private.add_losses(self._layers):
            for extra in self._model.losses:
                loss = loss + keras.ops.cast(extra, loss.dtype)
        return loss


def mean_over_samples(loss: Any) -> Any:
    """Reduces what a loss callable gave to the mean over its samples.

    Raises:
        SpecError: It gave no tensor.
    """
    called.require_tensor(loss, "the loss or objective")
    return loss if len(loss.shape) == 0 else keras.ops.mean(loss)


def moving_statistics(model: keras.Layer) -> list[Any]:
    """The floating-point weights that layers themselves move (batch normalisation's, for one).

    Weights that are merely frozen (`layer.trainable = False`) are not among them: nothing moves them.
    """
    layers = keras_private.layers_of(model)
    moved = {id(v) for layer in layers for v in keras_private.moved_by(layer)}
    return [
        variable
        for variable in model.non_trainable_variables
        if id(variable) in moved and keras.backend.is_float_dtype(variable.dtype)
    ]


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
