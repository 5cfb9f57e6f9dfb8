"""The replica group of one TensorFlow process of a pipeline run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters.common.pipeline import profiler as layer_profiler
from isotrain.adapters.common.pipeline.checks import local_weight_indices, require_built
from isotrain.adapters.tensorflow.base.variables import named_as
from isotrain.adapters.tensorflow.pipeline.comm import PipelineCommunicator
from isotrain.adapters.tensorflow.pipeline.modules import split_model
from isotrain.adapters.tensorflow.pipeline.stage import PipelineContext, TensorFlowStageWork
from isotrain.adapters.tensorflow.pipeline.weights import StageWeights
from isotrain.adapters.tensorflow.replica.action_times import ActionTimes
from isotrain.adapters.tensorflow.replica.replica_group import TensorFlowReplicaGroup
from isotrain.adapters.tensorflow.replica.tracing import MicroBatches, Weights, row
from isotrain.adapters.tensorflow.trainer.base import ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.optimizer import WeightUpdate
from isotrain.adapters.tensorflow.trainer.state import canonical_names, native
from isotrain.adapters.tensorflow.trainer.weights import weights_of
from isotrain.plugin import (
    MODEL_STATE,
    Action,
    Batch,
    ModelProfile,
    PipelineSplit,
    StateInfo,
    StateKind,
    TrainingSpec,
    Transfer,
    execute_stage,
)


class PipelineTrainer(ReplicaTrainer):
    """Trainer without optimizer slots until `update.shard_optimizer` names the weights of this stage."""

    def _update_of(self, spec: TrainingSpec, trainable: list[Any]) -> WeightUpdate:
        return WeightUpdate(spec, trainable, slots_for=list(map(_placeholder, trainable)))


def _placeholder(weight: Any) -> Any:
    """A tiny variable with a weight's name, rank and dtype, to make slots for."""
    variable = native(weight)
    return named_as(weight, tf.zeros([1] * variable.shape.rank, variable.dtype))


class PipelineReplicaGroup(TensorFlowReplicaGroup):
    """One stage of one replica, which keeps only its own stage's weights up to date."""

    _communicator: PipelineCommunicator
    _may_relax_shapes = False  # both ends of a transfer must know its shape

    def __init__(
        self, spec: TrainingSpec, communicator: PipelineCommunicator, cut: PipelineSplit
    ) -> None:
        """Builds the model, and keeps the optimizer's slots of this stage. Collective.

        Args:
            spec: Training spec.
            communicator: Communicator of this stage.
            cut: Split of the model into stages.
        """
        super().__init__(spec, tf.distribute.get_strategy(), communicator)
        trainer, self._topology = self._trainer, communicator.topology
        require_built(trainer.metrics.unbuilt)
        model, loss, self._check_equivalence = split_model(trainer, spec, cut)
        stage, shares_stage = self._topology.stage, self._topology.shares_stage
        seeds = model.seeds(stage) if shares_stage else ()
        self._context = PipelineContext(model, communicator, loss, trainer, seeds)
        stage_of = model.stage_of_weights(self._topology.stages)
        trainable, others = weights_of(trainer.model, spec)
        weights = [*trainable, *others]
        named = dict(zip(canonical_names(weights), map(native, weights), strict=True))
        self._weights = StageWeights(named, stage_of, communicator)
        local_indices = local_weight_indices(stage_of, list(map(native, trainable)), stage)
        self._local_weights = [native(trainable[index]) for index in local_indices]
        trainer.statistics[:] = filter(self._weights.is_local, trainer.statistics)
        trainer.others = list(filter(self._weights.is_local, trainer.others))
        self._clips = spec.clip is not None and spec.clip.global_norm is not None
        self._traced.function("broadcast initial weights", self._weights.trace_start)()
        self.shard_optimizer([local_indices])

    def _build(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> PipelineTrainer:
        return PipelineTrainer(spec, scope)

    def pipeline_step(
        self, batch: Batch, learning_rate: float, actions: Sequence[Sequence[Action]]
    ) -> tf.Tensor:
        self._set_rate(learning_rate)
        measure = self._measures_actions
        if self._weights.is_gathered:
            for micro_batch in itertools.islice(
                (candidate for candidate in batch.slices[0] if candidate.count), 1
            ):
                self._check_equivalence(micro_batch.inputs)
        self.reshard_weights()

        def trace(
            has_placeholders: bool, micro_batches: MicroBatches, weights: Weights, rate: tf.Tensor
        ) -> Any:
            def replica(position: int) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
                slice_weights, process = row(weights, position), self._topology.process
                work = TensorFlowStageWork(
                    self._context, micro_batches[position], slice_weights, has_placeholders, measure
                )
                with tf.control_dependencies(work.times):
                    execute_stage(actions[process], process, work)
                work.move_seeds(len(micro_batches[position]))
                self._update_stage(work, self._weight(actions[process], slice_weights))
                loss = self._communicator.sum_over_all([work.weighted_loss])[0] / self.replicas
                return loss, work.keepalive_outputs, work.times

            with self._trainer.update.learning_rate(rate):
                return self._traced.on_replicas(replica, trains=True)[0]

        name = "timed pipeline step" if measure else "pipeline step"
        loss, _, times = self._on_batch(name, trace, batch, self._rate_tensor)
        if measure:
            process = self._topology.process
            self._action_times = ActionTimes(times, _names(actions[process], process))
        return loss

    def set_action_timing(self, enabled: bool) -> None:
        self._measures_actions = enabled

    def _weight(self, actions: Sequence[Action], weights: tf.Tensor | None) -> tf.Tensor | None:
        """Sum of the weights of this process's micro-batches, a scalar; None for 1.

        Args:
            actions: Actions of this process.
            weights: Weight of each micro-batch, shape `[micro_batches]`; None when all are 1.
        """
        if weights is None or not self._topology.shares_stage:
            return None if weights is None else tf.reduce_sum(weights)
        computed = sorted({action.micro_batch for action in actions})
        return tf.reduce_sum(tf.gather(weights, computed))

    def _update_stage(self, work: TensorFlowStageWork, weight: tf.Tensor | None) -> None:
        """Averages this stage's gradients and statistics over the replicas, and updates its weights.

        Args:
            work: The stage's finished passes.
            weight: Sum of the weights of this process's micro-batches, a scalar; None for 1.
        """
        trainer, communicator = self._trainer, self._communicator
        gradients = work.gradients(self._local_weights)
        if self._topology.copies > 1:
            statistics = trainer.weighted_statistics(weight)
            means = communicator.all_reduce([*gradients, *statistics], "mean")
            gradients = means[: len(gradients)]
            trainer.agree_on_statistics(means[len(gradients) :])
        trainer.update.apply_shard(gradients, self._norm(gradients) if self._clips else None)

    def _norm(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Global norm of the gradients of all stages, a float64 scalar. Collective."""
        squares = [tf.reduce_sum(tf.cast(gradient, tf.float64) ** 2) for gradient in gradients]
        square = tf.add_n(squares)
        if self._topology.copy:  # the first process with this stage adds it
            square = tf.zeros_like(square)
        return tf.sqrt(self._communicator.sum_in_replica(square))

    def gather_stages(self) -> None:
        if not self._weights.is_gathered:
            self._traced.function("gather stages", self._weights.trace_gather)()
            self._weights.mark_gathered()

    def reshard_weights(self) -> None:
        self._weights.drop_other_stages()

    def profile_layers(self, batch: Batch) -> ModelProfile:
        model = self._context.model
        tensors = model.inputs(batch.slices[0][0].inputs)
        return layer_profiler.profile_calls(model.layer_calls(), tensors, self._passes)

    def _passes(
        self, compute: layer_profiler.Compute, inputs: Sequence[tf.Tensor], trained: Sequence[Any]
    ) -> tuple[Callable[[], list[tf.Tensor]], Callable[[], None]]:
        """Forward pass, and both passes, of one layer as traced functions, for inputs `[samples, ...]`."""

        def gradients(*tensors: tf.Tensor) -> list[tf.Tensor]:
            sources = [tensor for tensor in (*tensors, *trained) if tensor.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(sources)
                roots = [tensor for tensor in compute(*tensors) if tensor.dtype.is_floating]
            grads = tape.gradient(roots, sources)
            return [tensor for tensor in grads if tensor is not None]

        run_forward = tf.function(compute, autograph=False)
        run_both = tf.function(gradients, autograph=False)

        def forward() -> list[tf.Tensor]:
            outputs = run_forward(*inputs)
            self.synchronize_device()
            return outputs

        def both() -> None:
            run_both(*inputs)
            self.synchronize_device()

        return forward, both

    def plan_notes(self) -> list[str]:
        return super().plan_notes() + self._context.model.describe(self._topology.stages)

    def evaluation_step(self, batch: Batch) -> None:
        if self._topology.evaluates(len(self._context.model.chunks)):
            super().evaluation_step(batch)

    def _totals(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._communicator.sum_over_all(tensors)

    @property
    def is_single_process(self) -> bool:
        return self.replicas * self._topology.processes == 1

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        function = self._traced.function("max", self._communicator.max_over_all)
        return [float(number) for number in function(tf.constant(numbers, tf.float64))]

    def barrier(self) -> None:
        self._traced.function("barrier", lambda: self._totals([tf.ones(())]))()[0].numpy()

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        described = super().describe_state(kinds, replica=replica)
        if self._weights.is_gathered:
            return described
        local = {name: info for name, info in described.items() if not self.is_remote(name)}
        return {
            name: info.on_this_replica_only() if name in self._weights else info
            for name, info in local.items()
        }

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        state = super().read_state(kinds, replica=replica)
        return {name: value for name, value in state.items() if not self.is_remote(name)}

    def is_remote(self, name: str) -> bool:
        """Whether the state is of another stage and not gathered, or otherwise remote. Local."""
        return self._weights.is_remote(name) or super().is_remote(name)


def _names(actions: Sequence[Action], process: int) -> list[str]:
    """Names of a process's actions, without sends, which run beside them."""
    return [
        "wait" if isinstance(each, Transfer) else each.direction
        for each in actions
        if not isinstance(each, Transfer) or each.destination == process
    ]
