"""Layers of a Keras model that join their weights when they are called, and again in the backward pass."""

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
"""Layers that call those inside of them again and again."""


class ShardedLayers:
    """The layers of a model, of which each that is joined as a whole is computed again in the backward pass.

    The weights of one of them are here at a time, forward and backward: each waits for the one before.
    """

    def __init__(
        self, model: keras.Layer, weights: ShardedWeights, unit_bytes: int, is_called: bool = True
    ) -> None:
        """Has layers join their weights as they are called.

        Args:
            model: The built model.
            weights: Of it.
            unit_bytes: Of the weights of a layer that is joined as a whole, where its layers allow it.
            is_called: Whether it is always the model that is called, and not some of its layers.
        """
        self._weights = weights
        self._turns = TraceOrder()
        self._graph: Any = None
        self._regularized = [each for each in weights.of_model if each.regularizer is not None]
        self._regularizers = {id(each): each.regularizer for each in self._regularized}
        self._added: set[int] = set()
        self._units = _units(model, unit_bytes, is_called)
        for layer in self._units:
            layer.call = self._joining(layer)

    @contextlib.contextmanager
    def gather_on_read(self) -> Iterator[None]:
        """Within it, where a forward pass is traced, the model computes with weights that lie in parts.

        Raises:
            SpecError: It cannot be computed so.
        """
        self._graph = tf.compat.v1.get_default_graph()
        self._added = set()
        for variable in self._regularized:
            variable.regularizer = None  # its layer adds it, while the weight is here
        try:
            with _Reading(self._weights):
                yield
        finally:
            self._graph = None
            for variable in self._regularized:
                variable.regularizer = self._regularizers[id(variable)]
        for variable in self._regularized:
            if id(variable) not in self._added:
                raise SpecError(
                    f"strategy sharded: {variable.path} has a regularizer, and its layer is not called, so"
                    " that nobody joins it with stage=3. Take stage 1 or 2."
                )

    def without_numbers(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, the model computes with zeros for its weights, and moves nothing."""
        weights = self._weights.of_model
        return keras.StatelessScope([(each, tf.zeros(each.shape, each.dtype)) for each in weights])

    def recompute(self, model: keras.Layer, spec: TrainingSpec) -> None:
        """Has layers without trained weights computed again too, where the spec asks for it.

        Those that join weights are in any case; of a layer that has such inside it is those inside.
        """
        inside = {id(each) for unit in self._units for each in keras_private.layers_of(unit)}

        def compute_again(layer: keras.Layer) -> None:
            if id(layer) in inside:
                return
            if not layer.trainable_variables:
                block_of = functools.partial(_OwnCall, weights=self._weights)
                keras_recompute.recompute_layer(layer, recomputed, block_of)
                return
            for part in keras_private.sublayers_of(layer):
                compute_again(part)

        for layer in keras_recompute.layers_to_recompute(model, spec):
            compute_again(layer)

    def _joining(self, layer: keras.Layer) -> Callable[..., Any]:
        call = layer.call

        @functools.wraps(call)
        def call_or_join(*args: Any, **kwargs: Any) -> Any:
            if self._graph is None:
                return call(*args, **kwargs)
            self._require_outermost(layer)
            block = _JoiningCall(
                layer, self._alone(call), (args, kwargs), self._weights, self._penalties(layer)
            )

            def compute(*tensors: Any) -> list[Any]:
                return block.run_flat(tensors)

            compute.__name__ = layer.name
            parts = block.weights()
            again = recomputed_in_order(compute, self._turns, late=len(parts))
            results = again(*parts, *block.inputs())
            self._turns.note(results)
            return block.unpack(results)

        return call_or_join

    def _alone(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call in which layers inside join nothing: their weights are here."""

        @functools.wraps(call)
        def calling(*args: Any, **kwargs: Any) -> Any:
            graph, self._graph = self._graph, None
            try:
                return call(*args, **kwargs)
            finally:
                self._graph = graph

        return calling

    def _penalties(self, layer: keras.Layer) -> dict[int, Callable[[Any], Any]]:
        """What regularizes its weights, by their place among them, and was not added yet."""
        found = {
            place: self._regularizers[id(variable)]
            for place, variable in enumerate(layer.trainable_variables)
            if id(variable) in self._regularizers and id(variable) not in self._added
        }
        self._added |= {id(layer.trainable_variables[place]) for place in found}
        return found

    def _require_outermost(self, layer: keras.Layer) -> None:
        """Raises where replicas might not all come.

        Raises:
            SpecError: It is so.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise SpecError(
                f"strategy sharded: the layer {layer.name} is called in a loop or a branch, which replicas"
                " may not go through alike, and with stage=3 all join its weights. Give a bucket_megabytes"
                " that the layer fits into that has the loop or branch, or take stage 1 or 2."
            )


class _OwnCall(keras_recompute.LayerCall):
    """One call of a layer that reads no weights of others."""

    def __init__(
        self, layer: keras.Layer, call: Callable[..., Any], given: Any, weights: ShardedWeights
    ) -> None:
        super().__init__(layer, call, given)
        self._sharded_weights = weights

    def _scope(self, values: Sequence[tuple[keras.Variable, Any]]) -> keras.StatelessScope:
        return _Own(self._sharded_weights, values)


class _JoiningCall(_OwnCall):
    """One call of a layer, of whose weights the parts are given."""

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
        self._trained = [weights.place_of(variable) for variable in self._trainable]

    def weights(self) -> list[tf.Tensor]:
        return [
            tf.convert_to_tensor(self._sharded_weights.local_shards[place])
            for place in self._trained
        ]

    def run_flat(self, tensors: Sequence[Any]) -> list[Any]:
        """Joins the weights first; what regularizes them comes last."""
        count = len(self._trained)
        whole = self._sharded_weights.all_gather(self._trained, tensors[:count])
        before = operations()
        results = super().run_flat([*whole, *tensors[count:]])
        if found := unrepeatable_operations(before):
            raise SpecError(
                f"strategy sharded: the layer {self._layer.name} has the operation {found}, which draws,"
                " assigns or exchanges, or is a function of which nobody can tell; with stage=3 the layer is"
                " computed again in the backward pass, and would do so a second time. Take stage 1 or 2."
            )
        return [*results, *(penalty(whole[place]) for place, penalty in self._penalties.items())]

    def _refusal(self) -> str:
        return (
            f"strategy sharded: the layer {self._layer.name} moves variables that are not its own (it may"
            " draw random numbers without a seed generator of its own), and with stage=3, where it is"
            " computed again in the backward pass, would move them a second time. Take stage 1 or 2."
        )


class _Own(keras.StatelessScope):
    """Gives a layer its weights, and no others."""

    def __init__(
        self, weights: ShardedWeights, values: Sequence[tuple[keras.Variable, Any]] = ()
    ) -> None:
        super().__init__(values, collect_losses=True)
        self._weights = weights

    def get_current_value(self, variable: keras.Variable) -> Any:
        found = super().get_current_value(variable)
        if found is None and self._weights.has(variable):
            raise SpecError(
                f"strategy sharded: the weight {variable.path} is read past the layer that it belongs to, or"
                " is joined with, and with stage=3 it is joined for that layer alone. Give a smaller"
                " bucket_megabytes where an objective calls a part of that layer, or take stage 1 or 2."
            )
        return found

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if self._weights.has(update[0]):
            raise SpecError(
                f"strategy sharded: a layer sets its trainable weight {update[0].path} in a forward pass, and"
                " with stage=3 no replica has all of it. Take stage 1 or 2."
            )
        super().add_update(update)


class _Reading(_Own):
    """Has what is no weight where it is, as outside of any scope."""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        variable, value = update
        del self.state_mapping[id(variable)]
        with keras_private.uncast():
            native(variable).assign(tf.cast(value, variable.dtype))


def _units(model: keras.Layer, unit_bytes: int, is_called: bool) -> list[keras.Layer]:
    """The layers that are joined as a whole: the largest that are no larger; the model only if it is called.

    One that has trained weights of its own, or calls those inside of it in a loop, is not divided.
    """
    found: dict[int, keras.Layer] = {}

    def find(layer: keras.Layer) -> None:
        weights, parts = layer.trainable_variables, keras_private.sublayers_of(layer)
        if not weights:
            return
        inside = {id(variable) for part in parts for variable in part.trainable_variables}
        has_own = any(id(variable) not in inside for variable in weights)
        fits = sum(map(nbytes, map(native, weights))) <= unit_bytes
        fits = fits and (is_called or layer is not model)
        if fits or has_own or isinstance(layer, _UNDIVIDED):
            found[id(layer)] = layer
            return
        for part in parts:
            find(part)

    find(model)
    return list(found.values())
