"""Contents of layers: inner layers, weights, losses, hooks, graphs; and changes of `trainable`."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras.src.models.functional import Functional

from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.adapters.keras.private.misc import patched_attribute

Refuse = Callable[[Any], None]
Moments = Callable[[Any, Any], tuple[Any, Any]]
_watched: dict[int, tuple[weakref.ref[Any], Refuse]] = {}


def layers_of(layer: keras.Layer) -> list[keras.Layer]:
    """A layer and all layers inside it, at any depth."""
    return [layer, *layer._flatten_layers(include_self=False)]


def _probe_layers_of() -> None:
    inner = keras.layers.Dense(1)
    outer = keras.Sequential([keras.Sequential([inner])])
    layers = layers_of(outer)
    require(layers[0] is outer and any(each is inner for each in layers), "layers at any depth")


def variables_of(layer: keras.Layer) -> list[keras.Variable]:
    """The trainable variables that a layer itself holds, without those of its sublayers."""
    return list(layer._trainable_variables)


def _probe_variables_of() -> None:
    inner, outer = keras.layers.Dense(1), keras.layers.Dense(2)
    inner.build((None, 1))
    outer.inner, outer.borrowed = inner, inner.kernel
    outer.build((None, 1))
    borrowed, *local = variables_of(outer)
    require(borrowed is inner.kernel and len(local) == 2, "variables that a layer holds")


def sublayers_of(layer: keras.Layer) -> list[keras.Layer]:
    """The direct sublayers of a layer."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def _probe_sublayers_of() -> None:
    dense, inner = keras.layers.Dense(1), keras.Sequential(name="inner")
    inner.add(dense)
    inner.build((None, 2))
    sublayers = sublayers_of(keras.Sequential([inner]))
    require(
        [each for each in sublayers if each is not inner] == [], "no more than the layers inside"
    )
    require(any(each is dense for each in sublayers_of(inner)), "a layer in a Sequential")


def draws_random_numbers(layer: keras.Layer) -> bool:
    """Whether a layer has a seed generator itself; those of inner layers do not count."""
    return bool(layer._seed_generators)


def _probe_draws_random_numbers() -> None:
    require(draws_random_numbers(keras.layers.Dropout(0.5)), "a generator in Dropout")
    require(not draws_random_numbers(keras.layers.Dense(1)), "no generator in Dense")


def weights_updated_by(layer: keras.Layer) -> list[Any]:
    """The weights that a layer updates in its call, such as moving statistics, frozen or not."""
    return list(layer._non_trainable_variables)


def _probe_weights_updated_by() -> None:
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    layer.trainable = False
    updated = {id(variable) for variable in weights_updated_by(layer)}
    require(
        updated == {id(layer.moving_mean), id(layer.moving_variance)},
        "the moving mean and variance",
    )


def have_added_losses(layers: Iterable[keras.Layer]) -> bool:
    """Whether any layer added a loss (`add_loss`, activity regularizer) in its last call."""
    return any(layer._losses or layer._loss_ids for layer in layers)


def _probe_added_losses() -> None:
    layer = keras.layers.ActivityRegularization(l2=1.0)
    require(not have_added_losses([layer]), "no loss before the call")
    layer(keras.ops.ones((1, 2)))
    require(have_added_losses([layer]), "a loss after the call")


def forget_losses(layers: Iterable[keras.Layer], losses: Iterable[Any]) -> None:
    """Removes losses added within a `StatelessScope` from the layers that added them."""
    added = set(map(id, losses))
    for layer in layers:
        layer._loss_ids -= added


def _probe_forget_losses() -> None:
    layer, first = keras.layers.ActivityRegularization(l2=1.0), keras.ops.ones((1, 2))
    with keras.StatelessScope(collect_losses=True) as scope:
        layer.call(first)
        layer.add_loss(keras.ops.sum(first))
        require(len(layer.losses) == 1, "a loss that a layer has added")
        forget_losses([layer], scope.losses)
        require(not layer.losses, "none once it is disowned")


def intercept_assignments(
    note: Callable[[Any, Any], None],
) -> contextlib.AbstractContextManager[None]:
    """Context in which assignments call `note(variable, value)` and leave the variable unchanged."""
    return patched_attribute(keras.Variable, "assign", note)


def _probe_intercept_assignments() -> None:
    layer, seen = keras.layers.BatchNormalization(), []
    layer.build((None, 2))
    before = keras.ops.convert_to_numpy(layer.gamma)
    with intercept_assignments(lambda variable, value: seen.append(id(variable))):
        layer.load_own_variables({str(index): np.full(2, 7.0) for index in range(4)})
    require(seen == [id(v) for v in layer.variables], "each variable of a layer is assigned to")
    require(bool((keras.ops.convert_to_numpy(layer.gamma) == before).all()), "and none is changed")


def hooks_of(layers: Iterable[keras.Layer]) -> list[Any]:
    """The dicts of torch hooks that layers have, filled or empty; an empty list on other frameworks."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [vars(layer)[name] for layer in layers for name in names if name in vars(layer)]


def _probe_hooks_of() -> None:
    if keras.backend.backend() != "torch":
        return
    layer = keras.layers.Dense(1)
    hooks = hooks_of([layer])
    require(not any(hooks), "no hooks on a new layer")
    layer.register_forward_hook(lambda *arguments: None)
    require(any(hooks), "a hook in the layer's table")


def register_weights(layers: Iterable[keras.Layer]) -> None:
    """Registers layers' present weights as torch parameters; Keras registers only those made in `build`.

    So do the functional models that sequential ones keep, which are none of their layers.
    """
    modules = {id(module): module for layer in layers for module in layer.modules()}
    for module in modules.values():
        if hasattr(module, "_torch_params"):
            weights = {id(variable.value) for variable in module.variables}
            if weights != set(map(id, module.parameters())):
                module._track_variables()


def _probe_register_weights() -> None:
    if keras.backend.backend() != "torch":
        return
    layer = keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((2,)), layer])
    layer.enable_lora(1)
    register_weights(layers_of(model))
    registered = {id(parameter) for parameter in model.parameters()}
    require(
        registered == {id(v.value) for v in model.variables},
        "the weights of a layer, and no others",
    )


def is_functional(model: Any) -> bool:
    """Whether a model is a functional model."""
    return isinstance(model, Functional)


def nodes_of(model: keras.Model) -> list[Any]:
    """Graph nodes (calls of layers and operations) of a functional model, in topological order."""
    by_depth = model._nodes_by_depth
    ordered = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in ordered if node.operation and not node.is_input]


def standardized_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """A functional model's inputs as a flat list of tensors, converted and reshaped as its call does."""
    return list(model._standardize_inputs(inputs))


def _probe_functional_graph() -> None:
    first, second = keras.layers.Dense(2), keras.layers.Dense(1)
    inputs = keras.Input((3,))
    hidden = first(inputs)
    model = keras.Model(inputs, keras.ops.add(second(hidden), hidden))
    require(is_functional(model) and not is_functional(keras.Sequential()), "graphs of layers")
    nodes = nodes_of(model)
    require([node.operation for node in nodes[:2]] == [first, second], "layers in their order")
    computed = {id(inputs): standardized_inputs(model, np.ones((1, 3)))[0]}
    for node in nodes:
        args, kwargs = node.arguments.fill_in(computed)
        computed[id(node.outputs[0])] = node.operation(*args, **kwargs)
    output = computed[id(model.outputs[0])]
    require(bool(keras.ops.all(output == model(np.ones((1, 3))))), "the model, call by call")


def watch_trainable(watched: Iterable[Any], refuse: Refuse) -> None:
    """Makes changes of `trainable` of these layers and variables call `refuse` first.

    Args:
        watched: Layers and variables; only weak references are kept.
        refuse: Called with the layer or variable; raises the error for the user.
    """
    for each in watched:
        _watch_class(type(each))
        _watched[id(each)] = weakref.ref(each, functools.partial(_forget, id(each))), refuse


def unwatch_trainable(watched: Iterable[Any]) -> None:
    """Allows `trainable` of these layers and variables to change again."""
    for each in watched:
        _watched.pop(id(each), None)


def _forget(number: int, _: weakref.ref[Any]) -> None:
    _watched.pop(number, None)


def _watch_class(kind: type) -> None:
    """Wraps the setter of `trainable`, in the base class that defines it, to check for watched objects."""
    base: Any = next(each for each in kind.__mro__ if "trainable" in vars(each))
    original = vars(base)["trainable"]
    if getattr(original.fset, "_checks_watched", False):
        return

    def set_checked(owner: Any, value: Any) -> None:
        if _watched and bool(value) != owner.trainable:
            entry = _watched.get(id(owner))
            if entry is not None and entry[0]() is owner:
                entry[1](owner)
        original.fset(owner, value)

    vars(set_checked)["_checks_watched"] = True
    base.trainable = property(original.fget, set_checked, doc=original.__doc__)


def _probe_watch_trainable() -> None:
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    seen: list[Any] = []
    watch_trainable([layer, layer.kernel], seen.append)
    layer.trainable = True
    require(not seen, "no refusal where nothing changes")
    layer.trainable = False
    require(seen[0] is layer and seen[1] is layer.kernel, "a layer sets its variables")
    unwatch_trainable([layer, layer.kernel])
    layer.trainable = True
    require(len(seen) == 2, "no refusal for what is no longer watched")


def set_path(variable: keras.Variable, path: str) -> None:
    """Renames a variable: canonical names of weights and of optimizer state come from its path."""
    variable._path = path


def _probe_set_path() -> None:
    variable = keras.Variable(0.0, name="a")
    set_path(variable, "b/a")
    require(variable.path == "b/a", "a path that is set")


def set_moments(layer: Any, make: Callable[[Moments], Moments]) -> None:
    """Replaces the function by which a batch normalization gets mean and variance of its inputs.

    Args:
        layer: Batch normalization.
        make: Takes the function of inputs and mask to mean and variance, and returns its replacement.
    """
    layer._moments = make(layer._moments)


def has_set_moments(layer: Any) -> bool:
    """Whether `set_moments` was called with a batch normalization."""
    return "_moments" in vars(layer)


def _probe_set_moments() -> None:
    layer = keras.layers.BatchNormalization(momentum=0.0, epsilon=1e-9)
    set_moments(layer, lambda _: lambda inputs, mask: (keras.ops.ones(1), 4 * keras.ops.ones(1)))
    normalized = keras.ops.convert_to_numpy(layer(keras.ops.full((1, 1), 5.0), training=True))
    require(
        abs(float(normalized[0, 0]) - 2.0) < 1e-6, "normalized by mean and variance of a function"
    )
    require(has_set_moments(layer), "a function of its own")


class AttentionLayers(NamedTuple):
    """Inner layers of a MultiHeadAttention.

    Attributes:
        projections: Projections of query, key and value to heads: kernels `[features, heads, size]`.
        output: Projection of the heads' results: kernel `[heads, size, features]`.
        dropout: Dropout of the attention scores.
        heads_axis: Axis of the heads in the scores, shape `[batch, ..., heads, queries, ..., keys, ...]`.
    """

    projections: Sequence[Any]
    output: Any
    dropout: Any
    heads_axis: int


def attention_layers(layer: Any) -> AttentionLayers | None:
    """Inner layers of a built MultiHeadAttention; None for one with layers besides these."""
    projections = [layer._query_dense, layer._key_dense, layer._value_dense]
    known = [*projections, layer._output_dense, layer._softmax, layer._dropout_layer]
    if any(all(each is not inner for inner in known) for each in sublayers_of(layer)):
        return None
    heads_axis = -1 - 2 * len(layer._attention_axes)
    return AttentionLayers(projections, layer._output_dense, layer._dropout_layer, heads_axis)


def set_shape(variable: keras.Variable, shape: Iterable[int]) -> None:
    """Sets the shape of a variable to that of the value that it got."""
    variable._shape = tuple(shape)


def replace_value(variable: keras.Variable, value: Any) -> None:
    """Lets a variable hold another variable of the framework, whose shape may be another one."""
    variable._value = value
    set_shape(variable, value.shape)


def _probe_attention_layers() -> None:
    layer = keras.layers.MultiHeadAttention(2, 3)
    layer.build((None, 4, 5), (None, 4, 5))
    inner = attention_layers(layer)
    require(inner is not None, "known inner layers")
    assert inner is not None
    require(isinstance(inner.dropout, keras.layers.Dropout), "dropout of scores")
    require([tuple(e.kernel.shape) for e in inner.projections] == [(5, 2, 3)] * 3, "projections")
    require(tuple(inner.output.kernel.shape) == (2, 3, 5), "the output projection")
    require(inner.heads_axis == -3, "the axis of the heads")
    set_shape(inner.output.kernel, (1, 3, 5))
    require(tuple(inner.output.kernel.shape) == (1, 3, 5), "a shape that is set")
    replace_value(inner.output.kernel, inner.projections[0].kernel.value)
    require(inner.output.kernel.value is inner.projections[0].kernel.value, "a value that is set")
    require(tuple(inner.output.kernel.shape) == (5, 2, 3), "the shape of such a value")


PROBES = (
    PrivateApiProbe("Variable._path", _probe_set_path),
    PrivateApiProbe("Layer._flatten_layers", _probe_layers_of),
    PrivateApiProbe("Layer._trainable_variables", _probe_variables_of),
    PrivateApiProbe("Layer._flatten_layers, not recursive", _probe_sublayers_of),
    PrivateApiProbe("Layer._seed_generators", _probe_draws_random_numbers),
    PrivateApiProbe("Layer._non_trainable_variables", _probe_weights_updated_by),
    PrivateApiProbe("Layer._losses and Layer._loss_ids", _probe_added_losses),
    PrivateApiProbe("Layer._loss_ids by identity", _probe_forget_losses),
    PrivateApiProbe("Layer.load_own_variables by Variable.assign", _probe_intercept_assignments),
    PrivateApiProbe("Layer._forward_hooks", _probe_hooks_of),
    PrivateApiProbe("BatchNormalization._moments", _probe_set_moments),
    PrivateApiProbe("inner layers of MultiHeadAttention, Variable._shape", _probe_attention_layers),
    PrivateApiProbe("TorchLayer._track_variables", _probe_register_weights),
    PrivateApiProbe("Functional._nodes_by_depth and _standardize_inputs", _probe_functional_graph),
    PrivateApiProbe(
        "the setters of Layer.trainable and Variable.trainable", _probe_watch_trainable
    ),
)
