"""One replica as pure functions: from its state and its samples to its new state.

Keras' variables only say what there is; their values are passed as a `State` through the functions, which JAX
can then differentiate and compile. Where a Keras object reads or writes variables (a layer, a metric, an
optimizer), that happens in a `StatelessScope`, which puts the values of a `State` in their place.
Nothing here knows of other replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import keras
from jax import lax

from isotrain.plugin import SpecError, StatePart, TrainingSpec, UnsupportedError, keras_model
from isotrain_jax.attention import choose_attention

Arrays: TypeAlias = "list[jax.Array]"
MicroBatch: TypeAlias = "tuple[Any, Any]"
"""Inputs and targets of one slice, shapes `[samples, ...]`."""


class State(NamedTuple):
    """State of a replica: values of its variables, and kept gradients; scalars have the shape `[1]`.

    A field may be left empty in a computation that does not need it.

    Attributes:
        trainable: Trainable weights.
        others: The model's other weights: moving statistics, seeds.
        slots: The optimizer's variables.
        metrics: The accumulators of the training metrics.
        kept: Gradients of the last update, after `keeping_gradients`; else empty.
    """

    trainable: Arrays
    others: Arrays
    slots: Arrays
    metrics: Arrays
    kept: Arrays


OF_VARIABLES = ("trainable", "others", "slots", "metrics")
"""The fields of a `State` that hold the values of variables."""


class Evaluated(NamedTuple):
    """Sums of an evaluation.

    Attributes:
        loss: Sum of the losses, and number of samples; float64.
        metrics: The accumulators of the metrics.
    """

    loss: jax.Array
    metrics: Arrays


class ReplicaTrainer:
    """Model, loss, optimizer and metrics of one replica.

    Attributes:
        model: The model as the user's function built it.
        variables: The Keras variables, in the fields in which `State` has their values.
        statistics: Indices of the other weights that forward passes update.
        optimizer_lr_schedule: Learning rate schedule of the optimizer; None where it has none.
        loss_scale: Variables of the optimizer's loss scale, by state name.
        own_slots: Indices of the slots that no other replica has, after `shard_optimizer`.
    """

    own_slots: Collection[int] = ()

    def __init__(self, spec: TrainingSpec) -> None:
        """Builds model, loss, optimizer and metrics.

        Raises:
            SpecError: The model function returned no Keras model.
            UnsupportedError: A metric cannot be compiled.
        """
        choose_attention(spec.precision)
        self._spec = spec
        self.model = keras_model.build_model(spec, "jax")
        if not isinstance(self.model, keras.Layer):
            raise SpecError(
                f"model: the function returned {type(self.model).__name__!r}; jax-mesh trains a Keras"
                " model."
            )
        self._optimizer, self.optimizer_lr_schedule = keras_model.build_optimizer(spec, "jax")
        self._optimizer.build(self.model.trainable_variables)
        if keras_model.weight_finalizer(self._optimizer, self.model.trainable_variables):
            raise UnsupportedError(
                "optimizer.custom: use_ema: jax-mesh does not replace weights by averages at the end."
            )
        self.loss_scale = keras_model.loss_scale_variables(self._optimizer)
        if any(metric.output or metric.weighted for metric in spec.metrics):
            raise UnsupportedError(
                "metrics: jax-mesh measures all that a model gives, and no sample weights."
            )
        self._metrics = _with_accumulators(keras_model.build_metrics(spec, "jax"))
        self._evaluation_metrics = keras_model.build_metrics(spec, "jax")
        self.variables = State(
            list(self.model.trainable_variables),
            list(self.model.non_trainable_variables),
            list(self._optimizer.variables),
            [variable for metric in self._metrics for variable in metric.variables],
            kept=[],
        )
        moved = {id(variable) for variable in keras_model.moving_statistics(self.model)}
        self.statistics = [i for i, v in enumerate(self.variables.others) if id(v) in moved]
        self._rate_place = self._place_of_rate()
        self._training_loss = keras_model.loss_computer(spec, self.model, "jax", training=True)
        self._evaluation_loss = keras_model.loss_computer(spec, self.model, "jax", training=False)

    def _place_of_rate(self) -> int:
        slots = [id(slot) for slot in self.variables.slots]
        return slots.index(id(self._optimizer.learning_rate))

    def shard_optimizer(self, places: Sequence[int]) -> Arrays:
        """Rebuilds the optimizer with slots of these trainable weights alone; returns the initial slots."""
        self._optimizer, _ = keras_model.build_optimizer(self._spec, "jax", self._optimizer.name)
        shared = {id(variable) for variable in self._optimizer.variables}
        self._optimizer.build([self.variables.trainable[place] for place in places])
        self._bound, self._optimizer.global_clipnorm = self._optimizer.global_clipnorm, None
        slots = list(self._optimizer.variables)
        self.variables = self.variables._replace(slots=slots)
        self.own_slots = {place for place, slot in enumerate(slots) if id(slot) not in shared}
        self._rate_place = self._place_of_rate()
        return _packed(slot.value for slot in slots)

    def sums(self) -> dict[str, Any]:
        """The variables of the training metrics, as `METRIC/SUM`."""
        return {
            f"{metric.name}/{name}": variable
            for metric in self._metrics
            for name, variable in zip(keras_model.sum_names(metric), metric.variables, strict=True)
        }

    def places(self, part: StatePart) -> tuple[str, Sequence[int]]:
        """Location of a part of the state for strategies: the field of `State`, and indices in it."""
        if part == "trainable":
            return "trainable", range(len(self.variables.trainable))
        if part == "statistics":
            return "others", self.statistics
        slots = enumerate(self.variables.slots)
        return "slots", [i for i, v in slots if v.shape and keras.backend.is_float_dtype(v.dtype)]

    def initial_state(self) -> State:
        """The values that the variables were built with."""
        return State(*(_packed(v.value for v in group) for group in self.variables))

    def contribution(
        self,
        state: State,
        pieces: Sequence[MicroBatch],
        weights: jax.Array,
        join: Callable[[Arrays], Arrays] | None = None,
        take: Callable[[Arrays], Arrays] = list,
    ) -> tuple[jax.Array, Arrays, State]:
        """Computes a replica's part of the mean loss, a scalar, and its gradients.

        Args:
            state: State of the replica.
            pieces: Slices of the replica, one after the other.
            weights: Weight of each slice, shape `[pieces]`; a slice of weight 0 is a placeholder.
            join: All-gathers the weights, where the state has shards of them. The result is not
                kept for the backward pass, which gathers them again.
            take: Reduces the gradients of each slice; its results are summed in their place.

        Returns:
            The sum over the slices of weight * mean loss; its gradients (of the scaled loss, where the
            precision needs loss scaling), differentiated through `join`; and the state with metrics, moving
            statistics and seeds as the forward passes left them.
        """
        sums: tuple[jax.Array, Arrays] | None = None
        for index, piece in enumerate(pieces):
            loss, gradients, after = self._forward_and_backward(state, piece, weights[index], join)
            state = self._unless_empty(weights[index], state, after)
            own = (loss, take(gradients))
            sums = own if sums is None else jax.tree.map(jnp.add, sums, own)
        assert sums is not None
        return *sums, state

    def _forward_and_backward(
        self,
        state: State,
        piece: MicroBatch,
        weight: jax.Array,
        join: Callable[[Arrays], Arrays] | None,
    ) -> tuple[jax.Array, Arrays, State]:
        """Weighted loss of a slice, a scalar; gradients in the weights' shapes; and the state after it."""

        def scaled_loss(trainable: Arrays) -> tuple[jax.Array, tuple[jax.Array, State]]:
            now = state._replace(trainable=join(trainable) if join else trainable)
            with self._holding(now) as scope:
                loss, predictions = self._training_loss(*piece)
                loss = loss * weight.astype(loss.dtype)
                scaled = self._optimizer.scale_loss(loss)
                keras_model.update_metrics(self._metrics, piece[1], predictions)
            return scaled, (loss, self._held(scope, now)._replace(trainable=trainable))

        passes = jax.checkpoint(scaled_loss, policy=_is_kept) if join else scaled_loss
        (_, (loss, after)), gradients = jax.value_and_grad(passes, has_aux=True)(state.trainable)
        return loss, gradients, after._replace(trainable=state.trainable)

    def _holding(self, state: State) -> keras.StatelessScope:
        """A scope in which the variables have the values of a state."""
        pairs: list[tuple[keras.Variable, jax.Array]] = []
        for field in OF_VARIABLES:
            if values := getattr(state, field):
                variables = getattr(self.variables, field)
                pairs += zip(variables, _shaped(variables, values), strict=True)
        return keras.StatelessScope(pairs, collect_losses=True)

    def _held(self, scope: keras.StatelessScope, state: State) -> State:
        """The state with the values that the variables have at the end of a scope."""
        values = {
            field: _packed(map(scope.get_current_value, getattr(self.variables, field)))
            for field in OF_VARIABLES
            if getattr(state, field)
        }
        return state._replace(**values)

    def _unless_empty(self, weight: jax.Array, before: State, after: State) -> State:
        """The state after a slice, whose weight is a scalar; a placeholder changes seeds alone."""
        others = list(after.others)
        for place in self.statistics:
            others[place] = jnp.where(weight == 0, before.others[place], others[place])
        metrics = _chosen(weight == 0, before.metrics, after.metrics)
        return after._replace(others=others, metrics=metrics)

    def apply(self, state: State, gradients: Arrays, rate: jax.Array) -> State:
        """Clips and applies gradients that are already reduced over the replicas.

        Args:
            state: State of the replica.
            gradients: Gradients as `contribution` returns them, in the weights' shapes.
            rate: Learning rate, shape `[1]`.
        """
        if state.kept:
            state = state._replace(kept=_packed(self.unscaled(state, gradients)))
        places = range(len(state.trainable))
        trained, slots = self._applied(places, state.trainable, state.slots, gradients, rate)
        return state._replace(trainable=trained, slots=slots)

    def _applied(
        self,
        places: Iterable[int],
        weights: Arrays,
        slots: Arrays,
        gradients: Arrays,
        rate: jax.Array,
    ) -> tuple[Arrays, Arrays]:
        """The trainable weights at some indices, and the slots, after an update; in their shapes."""
        variables, slots = [self.variables.trainable[place] for place in places], list(slots)
        slots[self._rate_place] = rate
        trained, moved = self._optimizer.stateless_apply(
            _shaped(self.variables.slots, slots),
            _shaped(variables, gradients),
            _shaped(variables, weights),
        )
        return _packed(trained), _packed(moved)

    def update_shard(
        self,
        places: Iterable[int],
        weights: Arrays,
        slots: Arrays,
        gradients: Arrays,
        norm: jax.Array | None,
        rate: jax.Array,
    ) -> tuple[Arrays, Arrays]:
        """Clips and applies reduced gradients of the weights whose slots this replica has.

        Args:
            places: Indices of these weights among the trainable ones.
            weights: Values of these weights.
            slots: All local slots.
            gradients: Gradients of these weights, in their shapes.
            norm: Norm of the gradients of all weights, shape `[1]`; None unless the spec clips by it.
            rate: Learning rate, shape `[1]`.

        Returns:
            The weights and the slots.
        """
        if norm is not None and self._bound is not None:
            factor = self._bound * jnp.minimum(1 / norm[0], 1 / self._bound)  # as Keras has it
            gradients = [gradient * factor.astype(gradient.dtype) for gradient in gradients]
        return self._applied(places, weights, slots, gradients, rate)

    def local_update(
        self,
        before: State,
        after: State,
        loss: jax.Array,
        gradients: Arrays,
        share: jax.Array,
        rate: jax.Array,
    ) -> tuple[State, jax.Array]:
        """Updates a replica from its own slices alone, and not at all where they have no samples.

        Args:
            before: State of the replica before its contribution.
            after: State of the replica after its contribution.
            loss: Loss of the contribution, a scalar, by weights that sum up to 1, or are 0.
            gradients: Gradients of the contribution, in the weights' shapes.
            share: Sum of the slices' weights in the global batch, shape `[1]`.
            rate: Learning rate, shape `[1]`.

        Returns:
            The new state, and the part of the mean loss, a scalar, as `contribution` returns it.
        """
        updated, empty = self.apply(after, gradients, rate), share[0] == 0
        return (
            updated._replace(
                trainable=_chosen(empty, before.trainable, updated.trainable),
                slots=_chosen(empty, before.slots, updated.slots),
            ),
            loss * share[0].astype(loss.dtype),
        )

    def keeping_gradients(self, state: State) -> State:
        """The state with room for the gradients of updates."""
        return state._replace(kept=[jnp.zeros_like(value) for value in state.trainable])

    def kept_gradients(self, state: State) -> Arrays:
        """The gradients of the last update, in the shapes of their weights; after `keeping_gradients`."""
        return _shaped(self.variables.trainable, state.kept)

    def unscaled(self, state: State, gradients: Arrays) -> Arrays:
        """Divides gradients by the loss scale; returns them in the shapes of their weights."""
        with self._holding(state):
            scale = self._optimizer.scale_loss(jnp.ones(()))
        return [
            gradient / scale.astype(gradient.dtype)
            for gradient in _shaped(self.variables.trainable, gradients)
        ]

    def rescaled(self, state: State, gradients: Arrays) -> Arrays:
        """Multiplies gradients, any shape, by the loss scale, as `apply` expects them."""
        with self._holding(state):
            return [self._optimizer.scale_loss(gradient) for gradient in gradients]

    def nothing_evaluated(self) -> Evaluated:
        """Initial sums of an evaluation."""
        return Evaluated(jnp.zeros(2, jnp.float64), _at_start(self._evaluation_metrics))

    def metrics_at_start(self) -> Arrays:
        """Initial accumulators of the training metrics."""
        return _at_start(self._metrics)

    def evaluate(
        self, state: State, evaluated: Evaluated, pieces: Sequence[MicroBatch], counts: jax.Array
    ) -> Evaluated:
        """Adds slices to the sums; `counts` has their samples, shape `[pieces]`, 0 for a placeholder."""
        for index, piece in enumerate(pieces):
            count = counts[index]
            variables = [v for metric in self._evaluation_metrics for v in metric.variables]
            with self._holding(state) as scope:
                for variable, value in zip(
                    variables, _shaped(variables, evaluated.metrics), strict=True
                ):
                    variable.assign(value)
                loss, predictions = self._evaluation_loss(*piece)
                keras_model.update_metrics(self._evaluation_metrics, piece[1], predictions)
            after = _packed(map(scope.get_current_value, variables))
            added = jnp.stack([loss.astype(jnp.float64) * count, count])
            evaluated = Evaluated(
                evaluated.loss + jnp.where(count == 0, 0.0, added),
                _chosen(count == 0, evaluated.metrics, after),
            )
        return evaluated

    def predict(self, state: State, inputs: Any) -> Any:
        """Predictions of the model in evaluation mode, shape `[samples, ...]`."""
        with self._holding(state):
            return self.model(inputs, training=False)

    def training_results(self, sums: Arrays) -> dict[str, float]:
        """Training metrics by name, from their accumulators summed over all replicas."""
        return _results(self._metrics, sums)

    def evaluation_results(self, sums: Evaluated) -> dict[str, float]:
        """Loss and metrics of an evaluation by name, from the sums over all replicas."""
        loss, count = sums.loss
        return {"loss": float(loss / count), **_results(self._evaluation_metrics, sums.metrics)}


def _with_accumulators(metrics: list[keras.metrics.Metric]) -> list[keras.metrics.Metric]:
    """Metrics, all of which must have their variables before the first samples.

    Raises:
        UnsupportedError: One creates variables at the first samples.
    """
    late = keras_model.unbuilt_metrics(metrics)
    if late:
        raise UnsupportedError(
            f"metrics: jax-mesh compiles a step before it sees samples, and {', '.join(late)} makes"
            " variables only then. Leave it out, or give a function of your own, whose values are"
            " averaged."
        )
    return metrics


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a result is kept for the backward pass; weights are gathered, and unpadded, again."""
    return primitive not in (lax.all_gather_p, lax.slice_p, lax.convert_element_type_p)


def _shaped(variables: Sequence[keras.Variable], values: Iterable[jax.Array]) -> Arrays:
    """Values in the shapes of their variables."""
    return [x.reshape(variable.shape) for variable, x in zip(variables, values, strict=True)]


def _packed(values: Iterable[jax.Array]) -> Arrays:
    """Values in the shapes in which a `State` holds them: scalars as `[1]`."""
    return [value if value.ndim else value.reshape(1) for value in values]


def _chosen(condition: jax.Array, these: Arrays, others: Arrays) -> Arrays:
    """Elementwise choice between two lists of arrays, in their shapes, by a scalar condition."""
    return [jnp.where(condition, a, b) for a, b in zip(these, others, strict=True)]


def _at_start(metrics: Sequence[keras.metrics.Metric]) -> Arrays:
    return _packed(value for metric in metrics for value in metric.stateless_reset_state())


def _results(metrics: Sequence[keras.metrics.Metric], sums: Arrays) -> dict[str, float]:
    results, left = {}, iter(sums)
    for metric in metrics:
        own = _shaped(metric.variables, itertools.islice(left, len(metric.variables)))
        results[metric.name] = float(metric.stateless_result(own))
    return results
