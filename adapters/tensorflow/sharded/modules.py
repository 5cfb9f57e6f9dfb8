"""Modules of TensorFlow that gather their sharded weights when called, and again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.tensorflow.base import private_api
from isotrain.adapters.tensorflow.base.modules import named_modules, submodules_of
from isotrain.adapters.tensorflow.base.recompute import (
    TraceOrder,
    operations,
    override_call,
    recompute_module,
    recomputed_in_order,
    unrepeatable_operations,
)
from isotrain.adapters.tensorflow.base.variable_overlay import VariableOverlay
from isotrain.adapters.tensorflow.base.variables import nbytes
from isotrain.adapters.tensorflow.sharded.weights import ShardedWeights
from isotrain.plugin import SpecError, TrainingSpec


class ShardedModules:
    """Modules of a model, in FSDP units: each gathers its weights as a whole and is recomputed.

    Only one unit's weights are gathered at a time, forward and backward: each waits for the one before.
    """

    def __init__(
        self, model: tf.Module, weights: ShardedWeights, unit_bytes: int, is_called: bool = True
    ) -> None:
        """Makes modules gather their weights as they are called.

        Args:
            model: Model with all of its variables created.
            weights: Sharded weights of the model.
            unit_bytes: Bytes of the weights of a unit, where its modules allow it.
            is_called: Whether it is always the model that is called, and not some of its modules.

        Raises:
            SpecError: The model contains Keras layers.
        """
        if layers := private_api.keras_layers_of(model):
            raise SpecError(
                f"strategy sharded: {layers[0].name}: stage=3 gathers the weights of a tf.Module whose"
                " submodules are tf.Modules too, and this one holds a layer of Keras. Make it a Keras model,"
                " or use stage 1 or 2."
            )
        self._weights = weights
        self._others = [each for each in model.variables if not weights.has(each)]
        self._trace_order = TraceOrder()
        self._graph: Any = None
        self._overlay = VariableOverlay(weights.model_weights)
        self._units = _units(model, weights, unit_bytes, is_called)
        for name, module in self._units:
            override_call(module, self._gathering(name, type(module).__call__))

    @contextlib.contextmanager
    def gather_on_read(self) -> Iterator[None]:
        """Context in which a traced forward pass computes with sharded weights.

        Raises:
            SpecError: The model cannot be computed with sharded weights.
        """
        self._graph = tf.compat.v1.get_default_graph()
        try:
            with self._overlay.forbid_reads():
                yield
        finally:
            self._graph = None

    @contextlib.contextmanager
    def with_zero_weights(self) -> Iterator[None]:
        """Context in which the model computes with zeros for its weights, and updates nothing."""
        weights = self._weights.model_weights
        zeros = {id(each): tf.zeros(each.shape, each.dtype) for each in weights}
        values = _values(self._others)
        with self._overlay.redirect(zeros, self._others, values):
            yield

    def recompute(self, model: tf.Module, spec: TrainingSpec) -> None:
        """Recomputes modules without trained weights too, where the spec asks for it.

        Units are recomputed in any case; of a module that contains units, its other submodules are.
        """
        in_units = {id(each) for _, unit in self._units for each in (unit, *unit.submodules)}

        def recompute_outside_units(name: str, module: tf.Module) -> None:
            if id(module) in in_units:
                return
            if not any(map(self._weights.has, module.trainable_variables)):
                recompute_module(name, module)
                return
            for submodule in submodules_of(module, f"{name}."):
                recompute_outside_units(*submodule)

        modules = dict(named_modules(model))
        for name in spec.recomputed(modules, "."):
            recompute_outside_units(name, modules[name])

    def _gathering(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def call_or_gather(module: tf.Module, *args: Any, **kwargs: Any) -> Any:
            if self._graph is None:
                return call(module, *args, **kwargs)
            self._require_outermost(name)
            call_inner = functools.partial(self._without_gathering, call, module)
            gathering_call = _GatheringCall(
                name, module, call_inner, (args, kwargs), self._weights, self._overlay
            )

            def compute(*tensors: Any) -> list[Any]:
                return gathering_call.run_flat(tensors)

            shards = gathering_call.shards()
            recomputing = recomputed_in_order(compute, self._trace_order, late=len(shards))
            results = recomputing(*shards, *gathering_call.inputs())
            self._trace_order.note(results)
            return gathering_call.unpack(results)

        return call_or_gather

    def _without_gathering(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call in which inner modules gather nothing: their weights are gathered already."""
        graph, self._graph = self._graph, None
        try:
            return call(*args, **kwargs)
        finally:
            self._graph = graph

    def _require_outermost(self, name: str) -> None:
        """Refuses a call that some replicas may not make, or not once: the gather is collective.

        Raises:
            SpecError: The module is called in a loop, a branch or a `tf.function`.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise SpecError(
                f"strategy sharded: the module {name} is called in a loop, a branch or a tf.function, which"
                " not all replicas may run alike; with stage=3 all must gather its weights. Remove the"
                " tf.function; set bucket_megabytes so large that the module with the loop or branch fits;"
                " or use stage 1 or 2."
            )


class _GatheringCall:
    """One call of a module as a function of its weights' local shards and its inputs."""

    def __init__(
        self,
        name: str,
        module: tf.Module,
        call: Callable[..., Any],
        arguments: Any,
        weights: ShardedWeights,
        overlay: VariableOverlay,
    ) -> None:
        """Keeps the module and the call's arguments.

        Args:
            name: Name of the module, for messages.
            module: The module.
            call: The module's original call.
            arguments: Positional arguments and keyword arguments of the call.
            weights: Sharded weights of the model.
            overlay: Redirects reads of the module's variables to tensors.
        """
        self._name = name
        self._call = call
        self._weights = weights
        self._overlay = overlay
        self._trained = [
            variable for variable in module.trainable_variables if weights.has(variable)
        ]
        self._others = [variable for variable in module.variables if not weights.has(variable)]
        self._before = _values(self._others)
        self._indices = [weights.index_of(variable) for variable in self._trained]
        self._arguments = arguments
        self._leaves = tf.nest.flatten(arguments)
        self._inputs = [
            index for index, leaf in enumerate(self._leaves) if _is_differentiable(leaf)
        ]
        self._outputs: Any = None
        self._results: list[Any] = []
        self._updated: list[tf.Variable] = []

    def shards(self) -> list[tf.Tensor]:
        """Shards of the module's weights, in their local shapes: the first differentiable inputs."""
        return [tf.convert_to_tensor(self._weights.shards[index].local) for index in self._indices]

    def inputs(self) -> list[tf.Tensor]:
        """The differentiable tensors, of any shape, among the call's arguments."""
        return [self._leaves[index] for index in self._inputs]

    def run_flat(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers weights to unsharded shapes and calls the module; returns outputs and updated variables.

        Raises:
            SpecError: The module has an operation that cannot be repeated.
        """
        count = len(self._indices)
        full = self._weights.all_gather(self._indices, tensors[:count])
        trained = {id(each): value for each, value in zip(self._trained, full, strict=True)}
        leaves = list(self._leaves)
        for index, tensor in zip(self._inputs, tensors[count:], strict=True):
            leaves[index] = tensor
        args, kwargs = tf.nest.pack_sequence_as(self._arguments, leaves)
        before = operations()
        with self._overlay.redirect(trained, self._others, self._before):
            outputs = self._call(*args, **kwargs)
            after = [self._overlay.value(each) for each in self._others]
        if operation := unrepeatable_operations(before):
            raise SpecError(
                f"strategy sharded: the module {self._name} has the operation {operation}, which draws random"
                " numbers, assigns or communicates (or is a function that may do so); with stage=3 a module"
                " with weights is recomputed in the backward pass and would do it again. Draw by"
                " tf.random.stateless_*, set bucket_megabytes so small that this module does not fit, or"
                " use stage 1 or 2."
            )
        results = tf.nest.flatten(outputs)
        pairs = list(zip(self._others, after, self._before, strict=True))
        self._outputs = tf.nest.map_structure(lambda _: None, outputs)
        self._results = [None if tf.is_tensor(each) else each for each in results]
        self._updated = [each for each, new, old in pairs if new is not old]
        updated = [new for _, new, old in pairs if new is not old]
        return [*(each for each in results if tf.is_tensor(each)), *updated]

    def unpack(self, results: Sequence[tf.Tensor]) -> Any:
        """Assigns the variables that the call updated, in their shapes, and returns its outputs."""
        tensors = iter(results)
        leaves = [next(tensors) if each is None else each for each in self._results]
        for variable in self._updated:
            variable.assign(next(tensors))
        return tf.nest.pack_sequence_as(self._outputs, leaves)


def _values(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """Copies of the values of variables, in their shapes."""
    return [tf.identity(variable) for variable in variables]


def _is_differentiable(leaf: Any) -> bool:
    return tf.is_tensor(leaf) and leaf.dtype.is_floating


def _units(
    model: tf.Module, weights: ShardedWeights, unit_bytes: int, is_called: bool
) -> list[tuple[str, tf.Module]]:
    """FSDP units: the largest modules of at most `unit_bytes`; the model itself only if it is called.

    A module that has trained weights of its own is not divided: it may read them between its parts.

    Raises:
        SpecError: A module refers to one that contains it, so that the owners of weights are ambiguous.
    """
    units: dict[int, tuple[str, tf.Module]] = {}

    def visit(name: str, module: tf.Module, *ancestors: tf.Module) -> None:
        if any(each is ancestor for each in module.submodules for ancestor in ancestors):
            raise SpecError(
                f"strategy sharded: the module {name} refers back to one that holds it, so that TensorFlow"
                " counts all weights of that one as its own too; with stage=3 it would gather them. Hold the"
                " reference by `weakref.ref`, or use stage 1 or 2."
            )
        trained = [each for each in module.trainable_variables if weights.has(each)]
        if not trained:
            return
        submodules = list(submodules_of(module, f"{name}." if name else ""))
        inner_ids = {
            id(each) for _, submodule in submodules for each in submodule.trainable_variables
        }
        has_own = any(id(each) not in inner_ids for each in trained)
        fits = sum(map(nbytes, trained)) <= unit_bytes and (is_called or module is not model)
        if callable(module) and (fits or has_own):
            units[id(module)] = name or type(module).__name__, module
            return
        for submodule in submodules:
            visit(*submodule, module, *ancestors)

    visit("", model)
    return list(units.values())
