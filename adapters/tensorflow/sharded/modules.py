"""Modules of TensorFlow that join their weights when they are called, and again in the backward pass."""

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
    """The modules of a model, of which each that is joined as a whole is computed again in the backward pass.

    The weights of one of them are here at a time, forward and backward: each waits for the one before.
    """

    def __init__(
        self, model: tf.Module, weights: ShardedWeights, unit_bytes: int, is_called: bool = True
    ) -> None:
        """Has modules join their weights as they are called.

        Args:
            model: With all of its variables.
            weights: Of it.
            unit_bytes: Of the weights of a module that is joined as a whole, where its modules allow it.
            is_called: Whether it is always the model that is called, and not some of its modules.

        Raises:
            SpecError: There are layers of Keras in it.
        """
        if layers := private_api.keras_layers_of(model):
            raise SpecError(
                f"strategy sharded: {layers[0].name}: stage=3 joins the weights of a tf.Module whose parts"
                " are such too, and this one holds a layer of Keras. Make the model one of Keras, or take"
                " stage 1 or 2."
            )
        self._weights = weights
        self._others = [each for each in model.variables if not weights.has(each)]
        self._turns = TraceOrder()
        self._graph: Any = None
        self._overlay = VariableOverlay(weights.of_model)
        self._units = _units(model, weights, unit_bytes, is_called)
        for name, module in self._units:
            override_call(module, self._joining(name, type(module).__call__))

    @contextlib.contextmanager
    def gather_on_read(self) -> Iterator[None]:
        """Within it, where a forward pass is traced, the model computes with weights that lie in parts.

        Raises:
            SpecError: It cannot be computed so.
        """
        self._graph = tf.compat.v1.get_default_graph()
        try:
            with self._overlay.forbid_reads():
                yield
        finally:
            self._graph = None

    @contextlib.contextmanager
    def without_numbers(self) -> Iterator[None]:
        """Within it, the model computes with zeros for its weights, and moves nothing."""
        weights = self._weights.of_model
        zeros = {id(each): tf.zeros(each.shape, each.dtype) for each in weights}
        values = _values(self._others)
        with self._overlay.redirect(zeros, self._others, values):
            yield

    def recompute(self, model: tf.Module, spec: TrainingSpec) -> None:
        """Has modules without trained weights computed again too, where the spec asks for it.

        Those that join weights are in any case; of a module that has such inside it is those inside.
        """
        inside = {id(each) for _, unit in self._units for each in (unit, *unit.submodules)}

        def compute_again(name: str, module: tf.Module) -> None:
            if id(module) in inside:
                return
            if not any(map(self._weights.has, module.trainable_variables)):
                recompute_module(name, module)
                return
            for part in submodules_of(module, f"{name}."):
                compute_again(*part)

        modules = dict(named_modules(model))
        for name in spec.recomputed(modules, "."):
            compute_again(name, modules[name])

    def _joining(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def call_or_join(module: tf.Module, *args: Any, **kwargs: Any) -> Any:
            if self._graph is None:
                return call(module, *args, **kwargs)
            self._require_outermost(name)
            own = functools.partial(self._alone, call, module)
            block = _JoiningCall(name, module, own, (args, kwargs), self._weights, self._overlay)

            def compute(*tensors: Any) -> list[Any]:
                return block.run_flat(tensors)

            parts = block.parts()
            again = recomputed_in_order(compute, self._turns, late=len(parts))
            results = again(*parts, *block.inputs())
            self._turns.note(results)
            return block.unpack(results)

        return call_or_join

    def _alone(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call in which modules inside join nothing: their weights are here."""
        graph, self._graph = self._graph, None
        try:
            return call(*args, **kwargs)
        finally:
            self._graph = graph

    def _require_outermost(self, name: str) -> None:
        """Raises where replicas might not all come, or come once.

        Raises:
            SpecError: It is so.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise SpecError(
                f"strategy sharded: the module {name} is called in a loop, a branch or a tf.function, which"
                " replicas may not go through alike, and with stage=3 all join its weights. Leave the"
                " tf.function out; give a bucket_megabytes that the module fits into that has the loop or"
                " branch; or take stage 1 or 2."
            )


class _JoiningCall:
    """One call of a module as a function of tensors: of the own parts of its weights, and of inputs."""

    def __init__(
        self,
        name: str,
        module: tf.Module,
        call: Callable[..., Any],
        given: Any,
        weights: ShardedWeights,
        overlay: VariableOverlay,
    ) -> None:
        """Notes what the module is called with.

        Args:
            name: For messages.
            module: Which.
            call: Its own, of what it is called with.
            given: Positional arguments, and others by name.
            weights: Of the model.
            overlay: Give them to the module.
        """
        self._name = name
        self._call = call
        self._weights = weights
        self._overlay = overlay
        self._trained = [each for each in module.trainable_variables if weights.has(each)]
        self._others = [each for each in module.variables if not weights.has(each)]
        self._before = _values(self._others)
        self._places = [weights.place_of(each) for each in self._trained]
        self._given = given
        self._leaves = tf.nest.flatten(given)
        self._inputs = [
            place for place, leaf in enumerate(self._leaves) if _is_differentiable(leaf)
        ]
        self._outputs: Any = None
        self._results: list[Any] = []
        self._moved: list[tf.Variable] = []

    def parts(self) -> list[tf.Tensor]:
        """The first tensors that its results are differentiated by."""
        return [tf.convert_to_tensor(self._weights.local_shards[place]) for place in self._places]

    def inputs(self) -> list[tf.Tensor]:
        """The others."""
        return [self._leaves[place] for place in self._inputs]

    def run_flat(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Joins the weights, and calls the module; gives outputs and what it moved in a row."""
        count = len(self._places)
        whole = self._weights.all_gather(self._places, tensors[:count])
        trained = {id(each): value for each, value in zip(self._trained, whole, strict=True)}
        leaves = list(self._leaves)
        for place, tensor in zip(self._inputs, tensors[count:], strict=True):
            leaves[place] = tensor
        args, kwargs = tf.nest.pack_sequence_as(self._given, leaves)
        before = operations()
        with self._overlay.redirect(trained, self._others, self._before):
            outputs = self._call(*args, **kwargs)
            after = [self._overlay.value(each) for each in self._others]
        if found := unrepeatable_operations(before):
            raise SpecError(
                f"strategy sharded: the module {self._name} has the operation {found}, which draws, assigns"
                " or exchanges, or is a function of which nobody can tell; with stage=3 a module with weights"
                " is computed again in the backward pass, and would do so a second time. Draw by"
                " tf.random.stateless_*, give a bucket_megabytes that this module does not fit into, or"
                " take stage 1 or 2."
            )
        results = tf.nest.flatten(outputs)
        pairs = list(zip(self._others, after, self._before, strict=True))
        self._outputs = tf.nest.map_structure(lambda _: None, outputs)
        self._results = [None if tf.is_tensor(each) else each for each in results]
        self._moved = [each for each, now, was in pairs if now is not was]
        moved = [now for _, now, was in pairs if now is not was]
        return [*(each for each in results if tf.is_tensor(each)), *moved]

    def unpack(self, results: Sequence[tf.Tensor]) -> Any:
        """Moves what the call moved, and gives its outputs."""
        found = iter(results)
        leaves = [next(found) if each is None else each for each in self._results]
        for variable in self._moved:
            variable.assign(next(found))
        return tf.nest.pack_sequence_as(self._outputs, leaves)


def _values(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [tf.identity(variable) for variable in variables]


def _is_differentiable(leaf: Any) -> bool:
    return tf.is_tensor(leaf) and leaf.dtype.is_floating


def _units(
    model: tf.Module, weights: ShardedWeights, unit_bytes: int, is_called: bool
) -> list[tuple[str, tf.Module]]:
    """The modules that are joined as a whole: the largest that are no larger; the model only if it is called.

    One that has trained weights of its own is not divided: it may read them between its parts.

    Raises:
        SpecError: One holds what holds it, so that nobody can tell whose weights are whose.
    """
    found: dict[int, tuple[str, tf.Module]] = {}

    def find(name: str, module: tf.Module, *above: tf.Module) -> None:
        if any(each is owner for each in module.submodules for owner in above):
            raise SpecError(
                f"strategy sharded: the module {name} refers back to one that holds it, so that TensorFlow"
                " counts all weights of that as its own too, and with stage=3 it would be joined with them."
                " Hold that by `weakref.ref`, or take stage 1 or 2."
            )
        trained = [each for each in module.trainable_variables if weights.has(each)]
        if not trained:
            return
        parts = list(submodules_of(module, f"{name}." if name else ""))
        inside = {id(each) for _, part in parts for each in part.trainable_variables}
        has_own = any(id(each) not in inside for each in trained)
        fits = sum(map(nbytes, trained)) <= unit_bytes and (is_called or module is not model)
        if callable(module) and (fits or has_own):
            found[id(module)] = name or type(module).__name__, module
            return
        for part in parts:
            find(*part, module, *above)

    find("", model)
    return list(found.values())
