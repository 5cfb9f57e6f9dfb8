"""Times the layers, the loss and the update of a split TensorFlow model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.common.pipeline.profiler import (
    Compute,
    profile_calls,
    seconds_in_turn,
    with_updates,
)
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.tensorflow.base.pass_costs import functions_inlined, pass_costs
from isotrain.adapters.tensorflow.base.variables import assign_all
from isotrain.adapters.tensorflow.base.without_values import (
    AbstractFunction,
    MissingValueError,
    WithoutValues,
)
from isotrain.adapters.tensorflow.pipeline.stage import PipelineContext, floating
from isotrain.adapters.tensorflow.trainer.optimizer import WeightUpdate
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.adapters.tensorflow.trainer.weights import weights_of
from isotrain.plugin import ModelProfile, PassCosts, Slice, TrainingSpec


class LayerProfiler:
    """Profiles all chunks of a split model in one process. Local."""

    _layer_graph: Any = None
    """Graph of the pass of a layer that was called last, where values lack."""

    def __init__(
        self,
        context: PipelineContext,
        spec: TrainingSpec,
        rate: tf.Tensor,
        synchronize: Callable[[], None],
        new_update: Callable[[list[Any]], WeightUpdate],
    ) -> None:
        """Takes what a stage has.

        Args:
            context: State of the stage, with the split model and its trainer.
            spec: Training spec.
            rate: Learning rate, a scalar.
            synchronize: Waits until the device is done.
            new_update: Makes an optimizer, without slots, for all trainable weights.
        """
        self._context, self._spec, self._rate = context, spec, rate
        self._synchronize, self._new_update = synchronize, new_update
        self._trainable, _ = weights_of(context.trainer.model, spec)

    def estimated(self, micro_batch: Slice) -> ModelProfile:
        """Profile of the layers by their costs, without loss and update."""
        model = self._context.model
        tensors = model.inputs(micro_batch.inputs)
        return profile_calls(model.layer_calls(), tensors, self._passes, self._costs_of)

    def measured(self, micro_batch: Slice) -> ModelProfile:
        """Profile by the times of a micro-batch."""
        model = self._context.model
        tensors = model.inputs(micro_batch.inputs)
        profile = profile_calls(model.layer_calls(), tensors, self._passes)
        self._context.boundary_specs(micro_batch.inputs)  # drops losses that layers added in traces
        (loss_seconds,) = seconds_in_turn([self._loss_pass(micro_batch, tensors)])
        chunk_of = model.stage_of_weights(len(model.chunks))
        indices: list[list[int]] = [[] for _ in model.chunks]
        for index, weight in enumerate(self._trainable):
            indices[chunk_of.get(id(native(weight)), 0)].append(index)
        return with_updates(profile.layers, list(map(self._update_seconds, indices)), loss_seconds)

    def _loss_pass(
        self, micro_batch: Slice, tensors: Mapping[Any, tf.Tensor]
    ) -> Callable[[], None]:
        """Loss and metrics of a micro-batch, and the backward pass of the loss, as a traced function.

        Args:
            micro_batch: The micro-batch.
            tensors: Tensors that the layers return, by key, `[samples, ...]`.
        """
        context, keys = self._context, list(tensors)
        metrics = context.trainer.metrics

        @tf.function(autograph=False)
        def compute(values: Sequence[tf.Tensor], targets: Any) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch(floating(values))
                of_key = dict(zip(keys, values, strict=True))
                loss, predictions = context.loss.of(context.model.chunks[-1], of_key, targets)
            with metrics.measuring("train") as sums:
                metrics.update("train", targets, predictions)
            gradients = tape.gradient(loss, floating(values))
            return [loss, *sums, *(each for each in gradients if each is not None)]

        def run() -> None:
            compute(list(tensors.values()), micro_batch.targets)
            self._synchronize()

        return run

    def _update_seconds(self, indices: Sequence[int]) -> float:
        """Seconds in which an optimizer of its own updates weights, which stay as they are.

        Args:
            indices: Indices of the weights in the trainable ones.
        """
        if not indices:
            return 0.0
        weights = [native(self._trainable[index]) for index in indices]
        values = list(map(tf.identity, weights))
        update = self._new_update(self._trainable)
        update.shard_optimizer(indices)
        clip = self._spec.clip
        clips = clip is not None and clip.global_norm is not None

        @tf.function(autograph=False)
        def apply(gradients: Sequence[tf.Tensor]) -> None:
            with update.learning_rate(self._rate):
                update.apply_shard(gradients, keras_model.global_norm(gradients) if clips else None)

        def run() -> None:
            apply(values)
            self._synchronize()

        (seconds,) = seconds_in_turn([run])
        assign_all(weights, values)
        return seconds

    def _passes(
        self,
        compute: Compute,
        inputs: Sequence[tf.Tensor],
        differentiable: Sequence[bool],
        trained: Sequence[Any],
    ) -> tuple[Callable[[], list[tf.Tensor]], Callable[[], None]]:
        """Forward pass, and both passes, of one layer as traced functions, for inputs `[samples, ...]`.

        Gradients of weights are added to a tensor of their shape, as those of later micro-batches are.
        """

        def gradients(*tensors: tf.Tensor) -> list[tf.Tensor]:
            sources = floating(list(itertools.compress(tensors, differentiable)))
            weights = floating(trained)
            with tf.GradientTape() as tape:
                tape.watch(sources)
                roots = floating(compute(*tensors))
            grads = tape.gradient(roots, [*sources, *weights])
            present = [tensor for tensor in grads[: len(sources)] if tensor is not None]
            present += [
                tf.convert_to_tensor(gradient) + weight
                for gradient, weight in zip(grads[len(sources) :], weights, strict=True)
                if gradient is not None
            ]
            return present or roots or list(tensors)

        run_forward, run_both = map(self._traced_layer, (compute, gradients))

        def forward() -> list[tf.Tensor]:
            outputs = run_forward(*inputs)
            self._synchronize()
            return outputs

        def both() -> None:
            run_both(*inputs)
            self._synchronize()

        return forward, both

    def _traced_layer(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Traced form of a function of tensors; where values lack, its graph is kept when it is called."""
        if WithoutValues.entered is None:
            return tf.function(function, autograph=False)

        def inlined(*tensors: tf.Tensor) -> Any:
            with functions_inlined():
                return function(*tensors)

        def keep(graph: Any) -> None:
            self._layer_graph = graph

        return AbstractFunction(inlined, keep)

    def _costs_of(self, call: Callable[[], Any]) -> PassCosts:
        """Calls a pass of a layer, and returns its costs.

        Raises:
            MissingValueError: An operation does not tell them, and the pass has to be timed.
        """
        call()
        first, *others = tf.nest.flatten(
            self._layer_graph.structured_outputs, expand_composites=True
        )
        costs = pass_costs(self._layer_graph.get_operations(), first, others)
        if costs is None:
            raise MissingValueError("a layer with a loop or a branch in its graph is timed")
        return costs
