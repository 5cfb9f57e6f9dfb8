"""The replica group of one TensorFlow process of a pipeline run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters.common.pipeline.checks import local_weight_indices, require_built
from isotrain.adapters.common.pipeline.delayed_updates import (
    ContinuedPasses,
    WeightVersions,
)
from isotrain.adapters.common.pipeline.stage_group import StageGroup, micro_batches_of
from isotrain.adapters.tensorflow.base.variables import named_as
from isotrain.adapters.tensorflow.base.without_values import WithoutValues
from isotrain.adapters.tensorflow.pipeline.comm import PipelineCommunicator
from isotrain.adapters.tensorflow.pipeline.delayed_updates import (
    ContinuedStageWork,
    TensorFlowWeightVersions,
)
from isotrain.adapters.tensorflow.pipeline.layer_profiler import LayerProfiler
from isotrain.adapters.tensorflow.pipeline.modules import split_model
from isotrain.adapters.tensorflow.pipeline.stage import PipelineContext, TensorFlowStageWork
from isotrain.adapters.tensorflow.pipeline.weights import StageWeights
from isotrain.adapters.tensorflow.replica.action_times import ActionTimes
from isotrain.adapters.tensorflow.replica.replica_group import TensorFlowReplicaGroup
from isotrain.adapters.tensorflow.replica.tracing import MicroBatches, Weights, row
from isotrain.adapters.tensorflow.trainer.base import ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.optimizer import WeightUpdate
from isotrain.adapters.tensorflow.trainer.state import (
    canonical_names,
    described_tensor,
    native,
    to_numpy,
)
from isotrain.adapters.tensorflow.trainer.weights import weights_of
from isotrain.plugin import (
    MODEL_STATE,
    Action,
    Batch,
    ExecutedAction,
    ModelProfile,
    PipelineSplit,
    StateInfo,
    StateKind,
    TrainingSpec,
    Transfer,
    execute_stage,
)

_EXECUTION = "execution/"


class PipelineTrainer(ReplicaTrainer):
    """Trainer without optimizer slots until `update.shard_optimizer` names the weights of this stage."""

    def _update_of(self, spec: TrainingSpec, trainable: list[Any]) -> WeightUpdate:
        return WeightUpdate(spec, trainable, slots_for=list(map(_placeholder, trainable)))


def _placeholder(weight: Any) -> Any:
    """A tiny variable with a weight's name, rank and dtype, to make slots for."""
    variable = native(weight)
    shape = [1] * variable.shape.rank
    return named_as(weight, shape, lambda: tf.zeros(shape, variable.dtype))


class PipelineReplicaGroup(StageGroup, TensorFlowReplicaGroup):
    """One stage of one replica, which keeps only its own stage's weights up to date."""

    _communicator: PipelineCommunicator
    _without_values = WithoutValues
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
        self._delayed_passes: ContinuedStageWork | None = None
        super().__init__(spec, tf.distribute.get_strategy(), communicator)
        trainer, self._topology = self._trainer, communicator.topology
        require_built(trainer.metrics.unbuilt)
        model, loss, self._check_equivalence = split_model(trainer, spec, cut)
        stage, shares_stage = self._topology.stage, self._topology.shares_stage
        seeds = model.seeds(stage) if shares_stage else ()
        self._context = PipelineContext(model, communicator, loss, trainer, seeds)
        stage_of = self._stage_of = model.stage_of_weights(self._topology.stages)
        trainable, others = weights_of(trainer.model, spec)
        weights = [*trainable, *others]
        named = dict(zip(canonical_names(weights), map(native, weights), strict=True))
        self._trainable = dict(itertools.islice(named.items(), len(trainable)))
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
        self._begin_passes(batch.slices[0])

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

    @property
    def _has_all_weights(self) -> bool:
        return self._weights.is_gathered

    def _reshard(self) -> None:
        self._weights.drop_other_stages()

    def _continued(
        self, weights: Mapping[str, tf.Variable], delay: int, layout: str
    ) -> tuple[ContinuedPasses, WeightVersions]:
        self._delayed_passes = ContinuedStageWork(
            self._context, self._functions, self._on_batch, self._local_weights
        )
        return self._delayed_passes, TensorFlowWeightVersions(weights, delay, layout)

    def _mean_loss(self, share: tf.Tensor) -> tf.Tensor:
        total = self._traced.function("total loss", self._communicator.sum_over_all)([share])[0]
        return total / self.replicas

    def _delayed_update(self, is_late: bool, weight: float | None) -> None:
        """Updates this stage; by a micro-batch, by the mean over the samples of all its processes.

        Nothing is applied where these have none.
        """
        assert self._delayed_passes is not None
        self._rates.apply(is_late)
        gradients = self._delayed_passes.gradients()
        if self._topology.copies > 1:
            total = tf.constant(1.0 if weight is None else weight, tf.float64)
            *gradients, total = self._traced.function("mean", self._trace_mean)([*gradients, total])
            weight = None if weight is None else float(total)
        if weight == 0:
            return
        if weight is not None:
            gradients = [gradient * tf.cast(1 / weight, gradient.dtype) for gradient in gradients]
        norm = self._traced.function("norm", self._norm)(gradients) if self._clips else None
        self.update_shard([gradients], self._rate, None if norm is None else [norm])

    def _trace_mean(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Means of tensors of any shapes over the replicas, from this stage's processes. Collective."""
        return self._communicator.all_reduce(tensors, "mean")

    def _average_statistics(self, weight: float) -> None:
        if self._topology.copies > 1 and self._trainer.statistics:
            average = self._traced.function("average statistics", self._trace_average_statistics)
            average(self._functions.tensor_of(weight))

    def _trace_average_statistics(self, weight: tf.Tensor) -> None:
        """Averages moving statistics by a weight, a scalar. Collective."""
        statistics = self._trainer.weighted_statistics(weight)
        self._trainer.agree_on_statistics(self._communicator.all_reduce(statistics, "mean"))

    def set_action_timing(self, enabled: bool) -> None:
        if self._updates is None:
            self._measures_actions = enabled
        else:
            super().set_action_timing(enabled)

    def last_actions(self) -> Sequence[ExecutedAction]:
        if self._updates is None:
            return super().last_actions()
        return self._executed if self._measures_actions else ()

    def _weight(self, actions: Sequence[Action], weights: tf.Tensor | None) -> tf.Tensor | None:
        """Sum of the weights of this process's micro-batches, a scalar; None for 1.

        Args:
            actions: Actions of this process.
            weights: Weight of each micro-batch, shape `[micro_batches]`; None when all are 1.
        """
        if weights is None or not self._topology.shares_stage:
            return None if weights is None else tf.reduce_sum(weights)
        return tf.reduce_sum(tf.gather(weights, micro_batches_of(actions)))

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
        self.drain_pipeline()
        if not self._weights.is_gathered:
            self._traced.function("gather stages", self._weights.trace_gather)()
            self._weights.mark_gathered()

    def profile_layers(self, batch: Batch) -> ModelProfile:
        profiler = LayerProfiler(
            *(self._context, self._spec, self._rate_tensor, self.synchronize_device),
            lambda weights: WeightUpdate(self._spec, weights, list(map(_placeholder, weights))),
        )
        micro_batch = batch.slices[0][0]
        # what has no values takes no time
        return (profiler.estimated if self._lacks_values else profiler.measured)(micro_batch)

    def evaluation_step(self, batch: Batch) -> None:
        if self._topology.evaluates(len(self._context.model.chunks)):
            super().evaluation_step(batch)

    def _totals(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._communicator.sum_over_all(tensors)

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        function = self._traced.function("max", self._communicator.max_over_all)
        return [float(number) for number in function(tf.constant(numbers, tf.float64))]

    def barrier(self) -> None:
        self._traced.function("barrier", lambda: self._totals([tf.ones(())]))()[0].numpy()

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        described = super().describe_state(kinds, replica=replica)
        described |= {name: described_tensor(each) for name, each in self._states(kinds).items()}
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
        state |= {name: to_numpy(each) for name, each in self._states(kinds).items()}
        return {name: value for name, value in state.items() if not self.is_remote(name)}

    def _states(self, kinds: Sequence[StateKind]) -> dict[str, tf.Tensor]:
        """Earlier versions of the weights, in their shapes, by name, if their kind is among these."""
        versions = {} if self._versions is None else self._versions.state()
        is_read = "execution" in kinds
        return {f"{_EXECUTION}{name}": each for name, each in versions.items() if is_read}

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        self.drain_pipeline()
        if self._versions is None:
            super().write_state(state, replica=replica)
            return
        others: dict[str, np.ndarray] = {}
        versions: dict[str, np.ndarray] = {}
        for name, value in state.items():
            version = name.removeprefix(_EXECUTION)
            is_version = version != name and self._versions.owns(version)
            (versions if is_version else others)[version if is_version else name] = value
        super().write_state(others, replica=replica)
        self._versions.equalize([name for name in others if name in self._trainable])
        for name, value in versions.items():
            self._versions.write(name, value)

    def is_remote(self, name: str) -> bool:
        """Whether the state is of another stage and not gathered, or otherwise remote. Local."""
        return self._weights.is_remote(name) or super().is_remote(name)

    def close(self) -> None:
        self.drain_pipeline()
        if self._delayed_passes is not None:
            self._delayed_passes.sends.close()
        super().close()


def _names(actions: Sequence[Action], process: int) -> list[str]:
    """Names of a process's actions, without sends, which run beside them."""
    return [
        "wait" if isinstance(each, Transfer) else each.direction
        for each in actions
        if not isinstance(each, Transfer) or each.destination == process
    ]
