"""Keras layers that gather their sharded weights when they are called, and again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras import recompute as keras_recompute
from isotrain.adapters.tensorflow.base.recompute import (
    TraceOrder,
    operations,
    recomputed,
    recomputed_in_order,
    unrepeatable_operations,
)
from isotrain.adapters.tensorflow.base.variables import nbytes
from isotrain.adapters.tensorflow.sharded.weights import ShardedWeights
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.plugin import SpecError, TrainingSpec

_UNDIVIDED = (keras.layers.RNN, keras.layers.TimeDistributed)
"""Layers that call their inner layers in a loop."""


class ShardedLayers:
    """Layers of a Keras model, in FSDP units: each gathers its weights as a whole and is recomputed.

    Only one unit's weights are gathered at a time, forward and backward: each waits for the one before.
    """

    def __init__(
        self, model: keras.Layer, weights: ShardedWeights, unit_bytes: int, is_called: bool = True
    ) -> None:
        """Makes layers gather their weights as they are called.

        Args:
            model: The built model.
            weights: Sharded weights of the model.
            unit_bytes: Bytes of the weights of a unit, where its layers allow it.
            is_called: Whether it is always the model that is called, and not some of its layers.
        """
        self._weights = weights
        self._trace_order = TraceOrder()
        self._graph: Any = None
        self._regularized = [each for each in weights.model_weights if each.regularizer is not None]
        self._regularizers = {id(each): each.regularizer for each in self._regularized}
        self._added_regularizers: set[int] = set()
        self._units = _units(model, unit_bytes, is_called)
        for layer in self._units:
            layer.call = self._gathering(layer)

    @contextlib.contextmanager
    def gather_on_read(self) -> Iterator[None]:
        """Context in which a traced forward pass computes with sharded weights.

        Raises:
            SpecError: The model cannot be computed with sharded weights.
        """
        self._graph = tf.compat.v1.get_default_graph()
        self._added_regularizers = set()
        for variable in self._regularized:
            variable.regularizer = None  # its layer adds it, while the weight is gathered
        try:
            with _ForwardScope(self._weights):
                yield
        finally:
            self._graph = None
            for variable in self._regularized:
                variable.regularizer = self._regularizers[id(variable)]
        for variable in self._regularized:
            if id(variable) not in self._added_regularizers:
                raise SpecError(
                    f"strategy sharded: {variable.path} has a regularizer, and its layer is not called, so"
                    " that stage=3 never gathers it. Use stage 1 or 2."
                )

    def with_zero_weights(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the model computes with zeros for its weights, and updates nothing."""
        weights = self._weights.model_weights
        return keras.StatelessScope([(each, tf.zeros(each.shape, each.dtype)) for each in weights])

    def recompute(self, model: keras.Layer, spec: TrainingSpec) -> None:
        """Recomputes layers without trained weights too, where the spec asks for it.

        Units are recomputed in any case; of a layer that contains units, its other sublayers are.
        """
        in_units = {id(each) for unit in self._units for each in keras_private.layers_of(unit)}

        def recompute_outside_units(layer: keras.Layer) -> None:
            if id(layer) in in_units:
                return
            if not layer.trainable_variables:
                block_of = functools.partial(_IsolatedCall, weights=self._weights)
                keras_recompute.recompute_layer(layer, recomputed, block_of)
                return
            for sublayer in keras_private.sublayers_of(layer):
                recompute_outside_units(sublayer)

        for layer in keras_recompute.layers_to_recompute(model, spec):
            recompute_outside_units(layer)

    def _gathering(self, layer: keras.Layer) -> Callable[..., Any]:
        call = layer.call

        @functools.wraps(call)
        def call_or_gather(*args: Any, **kwargs: Any) -> Any:
            if self._graph is None:
                return call(*args, **kwargs)
            self._require_outermost(layer)
            gathering_call = _GatheringCall(
                layer,
                self._without_gathering(call),
                (args, kwargs),
                self._weights,
                self._penalties(layer),
            )

            def compute(*tensors: Any) -> list[Any]:
                return gathering_call.run_flat(tensors)

            compute.__name__ = layer.name
            shards = gathering_call.weights()
            recomputing = recomputed_in_order(compute, self._trace_order, late=len(shards))
            results = recomputing(*shards, *gathering_call.inputs())
            self._trace_order.note(results)
            return gathering_call.unpack(results)

        return call_or_gather

    def _without_gathering(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call in which inner layers gather nothing: their weights are gathered already."""

        @functools.wraps(call)
        def call_inner(*args: Any, **kwargs: Any) -> Any:
            graph, self._graph = self._graph, None
            try:
                return call(*args, **kwargs)
            finally:
                self._graph = graph

        return call_inner

    def _penalties(self, layer: keras.Layer) -> dict[int, Callable[[Any], Any]]:
        """Regularizers of a layer's weights that were not added yet, by the weight's index in the layer."""
        penalties = {
            index: self._regularizers[id(variable)]
            for index, variable in enumerate(layer.trainable_variables)
            if id(variable) in self._regularizers and id(variable) not in self._added_regularizers
        }
        self._added_regularizers |= {id(layer.trainable_variables[index]) for index in penalties}
        return penalties

    def _require_outermost(self, layer: keras.Layer) -> None:
        """Refuses a call that some replicas may not make: the gather is collective.

        Raises:
            SpecError: The layer is called in a loop or a branch.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise SpecError(
                f"strategy sharded: the layer {layer.name} is called in a loop or a branch, which not all"
                " replicas may run alike; with stage=3 all must gather its weights. Set bucket_megabytes so"
                " large that the layer with the loop or branch fits, or use stage 1 or 2."
            )


class _IsolatedCall(keras_recompute.LayerCall):
    """One call of a layer that cannot read other layers' sharded weights."""

    def __init__(
        self, layer: keras.Layer, call: Callable[..., Any], given: Any, weights: ShardedWeights
    ) -> None:
        super().__init__(layer, call, given)
        self._sharded_weights = weights

    def _scope(self, values: Sequence[tuple[keras.Variable, Any]]) -> keras.StatelessScope:
        return _GatheredWeightsScope(self._sharded_weights, values)


class _GatheringCall(_IsolatedCall):
    """One call of a layer as a function of its weights' local shards and its inputs."""

    def __init__(
        self,
        layer: keras.Layer,
        call: Callable[..., Any],
        given: Any,
        weights: ShardedWeights,
        penalties: dict[int, Callable[[Any], Any]],
    ) -> None:
        super().__init__(layer, call, given, weights)
        self._penalties = penalties
        self._trained = [weights.index_of(variable) for variable in self._trainable]

    def weights(self) -> list[tf.Tensor]:
        """Shards, local shapes, uncast, of the layer's weights: the first arguments of `run_flat`."""
        return [
            tf.convert_to_tensor(self._sharded_weights.shards[index].local)
            for index in self._trained
        ]

    def run_flat(self, tensors: Sequence[Any]) -> list[Any]:
        """Gathers the weights, calls the layer, and appends the weights' regularization losses.

        Raises:
            SpecError: The layer has an operation that cannot be repeated.
        """
        count = len(self._trained)
        full = self._sharded_weights.all_gather(self._trained, tensors[:count])
        before = operations()
        results = super().run_flat([*full, *tensors[count:]])
        if operation := unrepeatable_operations(before):
            raise SpecError(
                f"strategy sharded: the layer {self._layer.name} has the operation {operation}, which draws"
                " random numbers, assigns or communicates (or is a function that may do so); with stage=3 the"
                " layer is recomputed in the backward pass and would do it again. Use stage 1 or 2."
            )
        return [*results, *(penalty(full[index]) for index, penalty in self._penalties.items())]

    def _refusal(self) -> str:
        return (
            f"strategy sharded: the layer {self._layer.name} updates variables that are not its own (it"
            " may draw random numbers without a seed generator of its own); with stage=3 it is recomputed in"
            " the backward pass and would update them again. Use stage 1 or 2."
        )


class _GatheredWeightsScope(keras.StatelessScope):
    """Stateless scope that gives a layer its gathered weights, in unsharded shapes.

    It refuses reads of other sharded weights.
    """

    def __init__(
        self, weights: ShardedWeights, values: Sequence[tuple[keras.Variable, Any]] = ()
    ) -> None:
        super().__init__(values, collect_losses=True)
        self._weights = weights

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Value of a variable, in its shape; refuses a sharded weight that is not gathered here."""
        value = super().get_current_value(variable)
        if value is None and self._weights.has(variable):
            raise SpecError(
                f"strategy sharded: the weight {variable.path} is read outside the layer that it belongs to"
                " or is gathered with; with stage=3 it is gathered for that layer alone. Set a smaller"
                " bucket_megabytes where an objective calls a part of that layer, or use stage 1 or 2."
            )
        return value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Refuses an update of a sharded weight; keeps others, of the variable's shape."""
        if self._weights.has(update[0]):
            raise SpecError(
                f"strategy sharded: a layer sets its trainable weight {update[0].path} in a forward pass;"
                " with stage=3 no replica has all of it. Use stage 1 or 2."
            )
        super().add_update(update)


class _ForwardScope(_GatheredWeightsScope):
    """Scope of the forward pass, in which updates of variables that are not sharded are assigned at once."""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Assigns a variable a value of its shape at once."""
        super().add_update(update)
        variable, value = update
        del self.state_mapping[id(variable)]
        with keras_private.uncast():
            native(variable).assign(tf.cast(value, variable.dtype))


def _units(model: keras.Layer, unit_bytes: int, is_called: bool) -> list[keras.Layer]:
    """FSDP units: the largest layers of at most `unit_bytes`; the model itself only if it is called.

    A layer that has trained weights of its own, or calls inner layers in a loop, is not divided.
    """
    units: dict[int, keras.Layer] = {}

    def visit(layer: keras.Layer) -> None:
        weights, sublayers = layer.trainable_variables, keras_private.sublayers_of(layer)
        if not weights:
            return
        inner_ids = {
            id(variable) for sublayer in sublayers for variable in sublayer.trainable_variables
        }
        has_own = any(id(variable) not in inner_ids for variable in weights)
        fits = sum(map(nbytes, map(native, weights))) <= unit_bytes
        fits = fits and (is_called or layer is not model)
        if fits or has_own or isinstance(layer, _UNDIVIDED):
            units[id(layer)] = layer
            return
        for sublayer in sublayers:
            visit(sublayer)

    visit(model)
    return list(units.values())
