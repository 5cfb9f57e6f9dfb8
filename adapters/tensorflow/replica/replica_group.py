"""The replica group of one TensorFlow process, over any strategy and communicator."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters.common import weight_sharding
from isotrain.adapters.common.notes import OWN_DENOMINATOR, notes
from isotrain.adapters.keras import weights as keras_weights
from isotrain.adapters.tensorflow.base import gpu
from isotrain.adapters.tensorflow.base.initial_broadcast import InitialValues
from isotrain.adapters.tensorflow.base.private_api import copies
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.replica.action_times import ActionTimes
from isotrain.adapters.tensorflow.replica.replica import TensorFlowReplica
from isotrain.adapters.tensorflow.replica.tracing import (
    MicroBatches,
    TracedFunctions,
    TracedMetrics,
    Weights,
    padded,
    row,
)
from isotrain.adapters.tensorflow.trainer import export
from isotrain.adapters.tensorflow.trainer.base import ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.optimizer import Gradients
from isotrain.adapters.tensorflow.trainer.state import metric_state, to_numpy
from isotrain.adapters.tensorflow.trainer.step_clock import StepClock
from isotrain.adapters.tensorflow.trainer.weights import model_traits
from isotrain.adapters.weight_files import load_weight_arrays
from isotrain.plugin import (
    AVERAGED,
    EXPOSED_EXCHANGE,
    MODEL_STATE,
    Batch,
    Computation,
    ExecutedAction,
    ExportForm,
    LayerTrait,
    PassCosts,
    Phase,
    Reduction,
    ReplicaGroup,
    StateInfo,
    StateKind,
    TrainingSpec,
    UnsupportedError,
    map_tree,
)

_REWRITES_SUMS = "arithmetic_optimization"
"""Option of graphs of the whole process by which one operation adds several tensors, in another order."""
_INTEGER_DTYPES = frozenset(
    {tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64}
)


class TensorFlowReplicaGroup(ReplicaGroup):
    """Local replicas under one `tf.distribute` strategy, driven by one traced function per step.

    Attributes:
        strategy: `tf.distribute` strategy of the local replicas.
    """

    _may_relax_shapes = True
    _is_only_update = True
    """Whether no other group trains the model, as one of several named updates does."""

    def __init__(
        self,
        spec: TrainingSpec,
        strategy: tf.distribute.Strategy,
        communicator: Communicator,
        holder: tf.distribute.Strategy | InitialValues | None = None,
    ) -> None:
        """Builds the model on every local replica. Collective.

        Args:
            spec: Training spec.
            strategy: Strategy of the local replicas; the default strategy for a single one.
            communicator: Communicator with all other replicas.
            holder: Creates the variables; None: `strategy` does.
        """
        self.strategy = strategy
        self._spec = spec
        self._communicator = communicator
        self.replicas = communicator.replicas
        self.local_replicas = communicator.local_replicas
        self._holder = holder or strategy
        if spec.reproducible:
            graph_options = tf.config.optimizer.get_experimental_options()
            self._rewrites_sums = graph_options.get(_REWRITES_SUMS, True)
            tf.config.optimizer.set_experimental_options({_REWRITES_SUMS: False})
        self._trainer = self._build(spec, self._holder.scope)
        if isinstance(holder, InitialValues):
            holder.broadcast()
        self._trainer.record_generator_states()
        self._rate_dtype = tf.float64 if spec.precision == "float64" else tf.float32
        on_host = not gpu.are_used()
        self._host_dtypes = {*_INTEGER_DTYPES, self._rate_dtype} if on_host else set()
        self._is_optimizer_sharded = self._measures_actions = False
        self._has_denominators: bool | None = None
        self._action_times = ActionTimes((), ())
        self._is_first = True
        if not spec.updates:
            self._take_trainer(self._trainer)

    def _take_trainer(self, trainer: ReplicaTrainer) -> None:
        """Prepares steps of a trainer; nothing is traced yet."""
        self._trainer = trainer
        self._rate = -1.0
        self._rate_tensor = tf.constant(self._rate, self._rate_dtype)
        self._averages: list[list[tf.Variable]] = []
        """Averages of each local replica's weights, or what will hold them; empty until they are needed."""
        self._due_weight: tf.Tensor | None = None
        """Weight of the present weights in the averages, a scalar, until these have them."""
        trainer.step.connect(
            self._communicator.local_index,
            self._communicator.replica_index,
            self.replicas,
            self._communicator.sum,
        )
        self._functions = TracedFunctions(
            self.strategy,
            self._communicator,
            trainer,
            self._may_relax_shapes,
        )
        self._metrics = TracedMetrics(trainer, self._functions, self._totals)
        self._late_metric_state: list[tuple[dict[str, np.ndarray], int | None]] = []

    def for_updates(self) -> dict[str, ReplicaGroup]:
        """Groups of this one's model for the named updates of its spec, by name. Collective."""
        trainers = self._trainer.for_updates(self._spec, self._holder.scope)
        if isinstance(self._holder, InitialValues):
            self._holder.broadcast()
        groups: dict[str, ReplicaGroup] = {}
        for name, trainer in trainers.items():
            group = copy.copy(self)
            group._spec, group._is_only_update = self._spec.for_update(name), False
            group._is_first = not groups
            group._take_trainer(trainer)
            groups[name] = group
        return groups

    def _build(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> ReplicaTrainer:
        return ReplicaTrainer(spec, scope)

    @property
    def model(self) -> Any:
        """The model; under a strategy with several local replicas its weights are mirrored."""
        return self._trainer.model

    @property
    def trainer(self) -> ReplicaTrainer:
        """Trainer of the local replicas, whose methods are traced."""
        return self._trainer

    @property
    def _traced(self) -> TracedFunctions:
        """The traced functions of this group, before which due averages of weights are updated."""
        self._update_due_averages()
        return self._functions

    def _update_due_averages(self) -> None:
        if self._due_weight is not None:
            weight, self._due_weight = self._due_weight, None
            self.compute(_move_average, self._averages, [weight] * len(self._averages))

    def to_device(self, arrays: Any) -> Any:
        return map_tree(tf.constant, arrays)  # quicker than convert_to_tensor and tf.nest

    @property
    def takes_text(self) -> bool:
        return True

    def is_on_device(self, value: Any) -> bool:
        return isinstance(value, tf.Tensor) and value.dtype in self._host_dtypes

    def set_frozen(self, names: Collection[str]) -> None:
        if self._spec.compile:
            raise UnsupportedError(
                "session.freeze: XLA has compiled the model as it was at the start. Leave compile out."
            )
        self._trainer.set_frozen(names)
        self._traced.forget()

    def optimizer_lr_schedule(self) -> Callable[[int], float] | None:
        return self._trainer.update.optimizer_lr_schedule

    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        self._trainer.update.set_group_rates(rates)

    def momentum_setter(self) -> Callable[[float], None] | None:
        return self._trainer.update.momentum_setter()

    def weight_finalizer(self) -> Callable[[], None] | None:
        return self._trainer.update.weight_finalizer()

    def synchronous_step(self, batch: Batch, learning_rate: float) -> tf.Tensor:
        if learning_rate != self._rate:
            self._set_rate(learning_rate)
        if self._measures_actions:
            return self._timed_step(batch)
        if self._spec.weight_average is not None and self._is_only_update:
            return self._averaging_step(batch)
        return self._on_batch("step", self._trace_step, batch, self._rate_tensor)

    def _averaging_step(self, batch: Batch) -> tf.Tensor:
        """A synchronous step whose graph first updates the averages, if they are due; returns the mean loss.

        One graph serves all steps: tracing it again would take seconds.
        """
        if not self._averages:
            self.copy_averaged()
        weight, self._due_weight = self._due_weight, None
        if weight is None:
            weight = self._functions.tensor_of(0.0)
        return self._on_batch("step", self._trace_averaging_step, batch, self._rate_tensor, weight)

    def _trace_averaging_step(self, *arguments: Any) -> tf.Tensor:
        """Traces a synchronous step; its last argument is the weight for the averages, 0 for none due."""
        *of_step, weight = arguments

        def move(position: int) -> None:
            replica = TensorFlowReplica(self._trainer, self._communicator)
            averages = self._averages[position]
            tf.cond(weight > 0, lambda: _move_average(replica, averages, weight), lambda: None)

        self._traced.on_replicas(move)
        return self._trace_step(*of_step)

    def _trace_step(
        self, has_placeholders: bool, micro_batches: MicroBatches, weights: Weights, rate: tf.Tensor
    ) -> tf.Tensor:
        """Traces a synchronous step: returns the mean loss, a scalar. Collective."""
        return self._trace_timed_step(has_placeholders, micro_batches, weights, rate)[0][0]

    def _timed_step(self, batch: Batch) -> tf.Tensor:
        """A synchronous step whose graph notes when its actions end; returns the mean loss, a scalar."""
        begin = time.time()
        results = self._on_batch("timed step", self._trace_timed_step, batch, self._rate_tensor)
        ends = [max(moments) for moments in zip(*(ends for _, ends in results), strict=True)]
        is_single = len(batch.slices[0]) == 1
        names = ["forward", "backward"] if is_single else ["forward and backward"]
        if self.replicas > 1:
            names.append(EXPOSED_EXCHANGE)
        self._action_times = ActionTimes([begin, *ends], names)
        return results[0][0]

    def _trace_timed_step(
        self, has_placeholders: bool, micro_batches: MicroBatches, weights: Weights, rate: tf.Tensor
    ) -> list[tuple[tf.Tensor, list[tf.Tensor]]]:
        """Traces a synchronous step. Collective.

        Returns:
            For each local replica the mean loss, a scalar, and, if actions are timed, the times at which its
            own loss (of a single micro-batch), its gradients and the means were computed, float64 scalars.
        """

        def replica(position: int) -> tuple[tf.Tensor, list[tf.Tensor]]:
            trainer, slice_weights = self._trainer, row(weights, position)
            clock = StepClock() if self._measures_actions else None
            loss, gradients = trainer.contribution(
                micro_batches[position], slice_weights, has_placeholders, self._total, clock=clock
            )
            weight = None if slice_weights is None else tf.reduce_sum(slice_weights)
            if clock is not None:
                gradients = clock.mark(gradients)
            loss, gradients = self._reduced(loss, gradients, weight)
            if clock is not None and self.replicas > 1:
                gradients = clock.mark(gradients)
            # Where a process is lost, a step is taken as a whole or not at all, with the optimizer's count.
            reduced = [loss, *gradients] if self._spec.elastic is not None else []
            with tf.control_dependencies([each for each in reduced if each is not None]):
                trainer.update.apply(gradients)
            return loss, [] if clock is None else clock.times

        with self._trainer.update.learning_rate(rate):
            return self._traced.on_replicas(replica, trains=True)

    def _reduced(
        self, loss: tf.Tensor, gradients: Gradients, weight: tf.Tensor | None
    ) -> tuple[tf.Tensor, Gradients]:
        """All-reduces loss, gradients and moving statistics together; sets the statistics.

        Args:
            loss: This replica's part of the loss, scalar.
            gradients: Gradient per trainable weight, or None.
            weight: Sum of the replica's micro-batch weights, scalar; None when all are 1.

        Returns:
            The means of the loss and of the gradients.
        """
        if self.replicas == 1:
            return loss, gradients
        trainer = self._trainer
        present = [gradient for gradient in gradients if gradient is not None]
        statistics = trainer.weighted_statistics(weight)
        loss, *means = self._communicator.all_reduce([loss, *present, *statistics], "mean")
        trainer.agree_on_statistics(means[len(present) :])
        reduced = iter(means)
        return loss, [None if gradient is None else next(reduced) for gradient in gradients]

    def local_step(self, batch: Batch, learning_rate: float) -> tf.Tensor:
        self._set_rate(learning_rate)
        return self._on_batch("local step", self._trace_local_step, batch, self._rate_tensor)

    def _trace_local_step(
        self, has_placeholders: bool, micro_batches: MicroBatches, weights: Weights, rate: tf.Tensor
    ) -> tf.Tensor:
        """Traces a local step: returns the mean loss over all replicas, a scalar. Collective."""

        def replica(position: int) -> tf.Tensor:
            trainer, slice_weights = self._trainer, row(weights, position)
            with trainer.step.local():
                loss, gradients = trainer.contribution(
                    micro_batches[position],
                    slice_weights,
                    has_placeholders,
                    self._total,
                    local=True,
                )
            if slice_weights is not None and has_placeholders:
                trainer.update.apply_unless(tf.equal(tf.reduce_sum(slice_weights), 0), gradients)
            else:
                trainer.update.apply(gradients)
            return self._mean(loss)

        with self._trainer.update.learning_rate(rate):
            return self._traced.on_replicas(replica, trains=True)[0]

    def _mean(self, value: tf.Tensor) -> tf.Tensor:
        """Mean over all replicas, any shape. Collective."""
        return self._communicator.all_reduce([value], "mean")[0]

    def _total(self, value: tf.Tensor) -> tf.Tensor:
        """Sum over all replicas, any shape. Collective."""
        return self._communicator.all_reduce([value], "sum")[0]

    def _totals(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of tensors of any shapes over all processes. Collective."""
        return self._communicator.all_reduce(tensors, "sum")

    def gradients(self, batch: Batch) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
        results = self._on_batch("gradients", self._trace_gradients, batch)
        return [list(gradients) for gradients, _ in results], results[0][1]

    def _trace_gradients(
        self, has_placeholders: bool, micro_batches: MicroBatches, weights: Weights
    ) -> Any:
        def replica(position: int) -> tuple[list[tf.Tensor], tf.Tensor]:
            slice_weights = row(weights, position)
            loss, gradients = self._trainer.contribution(
                micro_batches[position], slice_weights, has_placeholders, self._total
            )
            return self._trainer.update.unscaled(gradients), self._mean(loss)

        return self._traced.on_replicas(replica, trains=True)

    def apply_gradients(
        self, gradients: Sequence[Sequence[tf.Tensor]], learning_rate: float
    ) -> None:
        self._set_rate(learning_rate)
        per_replica = [list(gradient_list) for gradient_list in gradients]
        self._traced.function("apply", self._trace_apply)(per_replica, self._rate_tensor)

    def _trace_apply(self, gradients: list[list[tf.Tensor]], rate: tf.Tensor) -> None:
        """Traces an update by gradients of the weights' shapes, for each local replica."""

        def replica(position: int) -> None:
            update = self._trainer.update
            update.apply([update.scaled(gradient) for gradient in gradients[position]])

        with self._trainer.update.learning_rate(rate):
            self._traced.on_replicas(replica)

    def part_sums(self, batch: Batch) -> Iterator[list[list[tf.Tensor]]]:
        assert batch.part_counts is not None
        slices, counts = max(map(len, batch.slices)), batch.part_counts
        own = zip(self.local_replicas, batch.slices, strict=True)
        parts = tuple(each[: counts[replica]] for replica, each in own)
        counted = padded(replace(batch, slices=parts), max(counts))
        batch = padded(batch, max(counts))
        if self._has_denominators is None:
            self._has_denominators = OWN_DENOMINATOR in self.step_notes(batch)
        totals = tf.ones(1, tf.float64)
        if self._has_denominators:
            totals = self._on_batch("denominators", self._trace_denominators, counted)[0]
        for index in range(slices):
            moves = tf.constant(index == 0)
            yield self._on_batch("part", self._trace_part, _part(batch, index), totals, moves)

    def _trace_denominators(
        self, has_placeholders: bool, micro_batches: MicroBatches, weights: tf.Tensor
    ) -> list[tf.Tensor]:
        """Traces sums of loss denominators and weights over the global batch: float64, `[losses + 1]`."""

        def replica(position: int) -> tf.Tensor:
            rows = self._trainer.loss_denominators(micro_batches[position], weights[position])
            by_replica = self._communicator.all_gather(rows)
            ordered = tf.unstack(tf.reshape(by_replica, [-1, rows.shape[1]]))
            return functools.reduce(operator.add, ordered)

        return self._traced.on_replicas(replica)

    def _trace_part(
        self,
        has_placeholders: bool,
        micro_batches: MicroBatches,
        weights: tf.Tensor,
        totals: tf.Tensor,
        moves: tf.Tensor,
    ) -> list[list[tf.Tensor]]:
        """Traces `part_sums` of one micro-batch of each local replica; arguments as in the trainer's."""
        return self._traced.on_replicas(
            lambda position: self._trainer.part_sums(
                micro_batches[position], weights[position], has_placeholders, totals, moves
            ),
            trains=True,
        )

    def evaluation_part_sums(self, batch: Batch) -> Iterator[list[list[tf.Tensor]]]:
        self._trainer.metrics.ensure_built()
        batch = padded(batch)
        for index in range(len(batch.slices[0])):
            part = _part(batch, index)
            yield self._traced.on_counts("evaluate part", self._trace_evaluation_part, part)

    def _trace_evaluation_part(
        self, has_placeholders: bool, micro_batches: MicroBatches, counts: tf.Tensor
    ) -> list[list[tf.Tensor]]:
        """Traces `evaluation_part_sums` of one micro-batch of each local replica."""

        def replica(position: int) -> list[tf.Tensor]:
            trainer = self._trainer
            with trainer.metrics.measuring("evaluation") as sums:
                trainer.evaluate(micro_batches[position], counts[position], has_placeholders)
            return sums

        return self._traced.on_replicas(replica)

    def accumulate(
        self, sums: Sequence[tf.Tensor], addends: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        return [total + addend for total, addend in zip(sums, addends, strict=True)]

    def add_part_sums(self, phase: Phase, sums: Sequence[Sequence[tf.Tensor]]) -> None:
        def trace(per_replica: list[list[tf.Tensor]]) -> None:
            def replica(position: int) -> None:
                is_counted = self._communicator.replica_index() == 0
                self._trainer.add_part_sums(phase, per_replica[position], is_counted)

            self._traced.on_replicas(replica)

        if any(sums):
            self._traced.function(("add part sums", phase), trace)([list(each) for each in sums])

    def shard_optimizer(self, weights: Sequence[Sequence[int]]) -> None:
        self._is_optimizer_sharded = True
        (local_indices,) = weights  # with several local replicas, all have the same slots
        self._trainer.update.shard_optimizer(local_indices)

    def reduce_scatter_gradients(
        self, batch: Batch, reduction: Reduction
    ) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
        def trace(has_placeholders: bool, micro_batches: MicroBatches, weights: Weights) -> Any:
            return self._trace_reduced(reduction, has_placeholders, micro_batches, weights)

        results = self._on_batch(f"reduced gradients, {reduction.each_slice}", trace, batch)
        return [list(reduced) for reduced, _, _ in results], results[0][1]

    def _trace_reduced(
        self,
        reduction: Reduction,
        has_placeholders: bool,
        micro_batches: MicroBatches,
        weights: Weights,
    ) -> Any:
        def replica(position: int) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
            handle = TensorFlowReplica(self._trainer, self._communicator)
            slice_weights = row(weights, position)

            def take(gradients: Gradients) -> Gradients:
                dense, reduced = self._trainer.update.unscaled(gradients), []
                for bucket, static in zip(reduction.buckets, reduction.statics, strict=True):
                    bucket_gradients = [dense[index] for index in bucket]
                    reduced += reduction.reduce(handle, bucket_gradients, static=static)
                return reduced

            take_each = take if reduction.each_slice else list
            loss, sums = self._trainer.contribution(
                micro_batches[position],
                slice_weights,
                has_placeholders,
                self._total,
                take=take_each,
            )
            reduced = sums if reduction.each_slice else take(sums)
            return reduced, self._mean(loss), handle.keepalive_outputs

        return self._traced.on_replicas(replica, trains=True)

    def update_shard(
        self,
        gradients: Sequence[Sequence[tf.Tensor]],
        learning_rate: float,
        norms: Sequence[tf.Tensor] | None,
    ) -> None:
        self._set_rate(learning_rate)
        per_replica = [list(gradient_list) for gradient_list in gradients]
        function = self._traced.function("update shard", self._trace_update_shard)
        function(per_replica, None if norms is None else list(norms), self._rate_tensor)

    def _trace_update_shard(
        self, gradients: list[list[tf.Tensor]], norms: list[tf.Tensor] | None, rate: tf.Tensor
    ) -> None:
        """Traces an update by gradients of the local weights' shapes; the norms are scalars."""

        def replica(position: int) -> None:
            norm = None if norms is None else norms[position]
            self._trainer.update.apply_shard(gradients[position], norm)

        with self._trainer.update.learning_rate(rate):
            self._traced.on_replicas(replica)

    @contextlib.contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        with self._trainer.preserving_training_state():
            yield

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        with self._trainer.preserving_state():
            yield

    def keep_gradients(self) -> bool:
        if self._is_optimizer_sharded:
            return False
        self._trainer.update.keep_gradients(self.strategy.scope)
        self._traced.forget()  # functions traced before keep no gradients
        return True

    def kept_gradients(self) -> list[list[tf.Tensor]]:
        variables = [copies(variable) for variable in self._trainer.update.kept_gradients]
        return [
            [tf.identity(value) for value in replica_values]
            for replica_values in zip(*variables, strict=True)
        ]

    def keep_gradient_norms(self, parts: Sequence[Sequence[int]]) -> None:
        self._trainer.update.keep_gradient_norms(self.strategy.scope, parts)
        self._traced.forget()  # functions traced before measure nothing

    def gradient_norms(self) -> list[tf.Tensor]:
        return tf.unstack(copies(self._trainer.update.gradient_norms)[0])

    def start_profile(self, folder: Path) -> Callable[[], None]:
        tf.profiler.experimental.start(str(folder))
        return tf.profiler.experimental.stop

    def set_action_timing(self, enabled: bool) -> None:
        # a GPU computes after its kernels are launched
        self._measures_actions = enabled and not gpu.are_used()

    def last_actions(self) -> Sequence[ExecutedAction]:
        return self._action_times.executed()

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        options = {} if static is None else {"static": static}

        def trace(*per_replica: Sequence[Any]) -> list[Any]:
            def replica(position: int) -> tuple[Any, list[tf.Tensor]]:
                handle = TensorFlowReplica(self._trainer, self._communicator)
                arguments = [value[position] for value in per_replica]
                return computation(handle, *arguments, **options), handle.keepalive_outputs

            return self._traced.on_replicas(replica)

        function = self._traced.function(("compute", computation, static), trace)
        return [result for result, _ in function(*map(list, values))]

    def copy_averaged(self) -> list[list[tf.Variable]]:
        """Copies them to variables that are the same in each call: a traced step updates these."""
        copied = self.compute(_copy_averaged)
        for variables, values in zip(self._averages, copied, strict=False):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        for values in copied[len(self._averages) :]:
            with tf.device(values[0].device):
                self._averages.append([tf.Variable(value, trainable=False) for value in values])
        return [list(each) for each in self._averages]

    def update_averages(
        self, averages: Sequence[Sequence[tf.Variable]], weight: float
    ) -> list[list[tf.Variable]]:
        """Updates them before the next computation: a synchronous step does so in its own graph.

        A function of its own would take 0.6 ms of the processor, however small the weights are.
        """
        self._due_weight = self._functions.tensor_of(weight)
        if not self._is_only_update:
            self._update_due_averages()
        return [list(each) for each in averages]

    def evaluation_step(self, batch: Batch) -> None:
        self._trainer.metrics.ensure_built()
        self._traced.on_counts("evaluate", self._trace_evaluation, batch)

    def _trace_evaluation(
        self, has_placeholders: bool, micro_batches: MicroBatches, counts: tf.Tensor
    ) -> None:
        """Traces an evaluation step; `counts` has the samples, shape `[local replicas, micro_batches]`."""

        def replica(position: int) -> None:
            self._trainer.evaluate(micro_batches[position], counts[position], has_placeholders)

        self._traced.on_replicas(replica)

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        outputs: list[Any] = self._traced.on_inputs(self._trace_predictions, list(inputs))
        return outputs

    def _trace_predictions(self, inputs: list[Any]) -> list[Any]:
        return self._traced.on_replicas(lambda position: self._trainer.predict(inputs[position]))

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        if phase == "evaluation":
            self._trainer.metrics.ensure_built()
        return self._metrics.collect(phase)

    def pop_metric_state(self) -> np.ndarray:
        return self._metrics.take()

    def add_metric_state(self, sums: np.ndarray) -> None:
        self._metrics.add(sums)

    def traits(self) -> list[LayerTrait]:
        return model_traits(self.model, self._spec.precision)

    def plan_notes(self) -> list[str]:
        return notes(self._spec, "tensorflow", self.traits())

    def step_notes(self, batch: Batch) -> list[str]:
        has_denominators = []

        def trace(has_placeholders: bool, micro_batches: MicroBatches, weights: Weights) -> None:
            trainer = self._trainer
            self._traced.on_replicas(
                lambda position: has_denominators.append(
                    trainer.has_own_denominator(micro_batches[position][0])
                )
            )

        self._traced.only_trace(trace, batch)
        return [
            *([OWN_DENOMINATOR] if any(has_denominators) else []),
            *self._trainer.frozen_state.notes,
        ]

    def pass_costs(self, batch: Batch) -> PassCosts | None:
        objective = self._trainer.objective
        if objective is not None and objective.step is not None:  # it may communicate
            return None
        costs: list[PassCosts | None] = []

        def trace(has_placeholders: bool, micro_batches: MicroBatches, weights: Weights) -> None:
            self._traced.on_replicas(
                lambda position: costs.append(self._trainer.pass_costs(micro_batches[position][0])),
                trains=True,
            )

        try:
            self._traced.only_trace(trace, batch)
        except Exception:  # what a `tf.function` of the model needs AutoGraph for
            return None
        return costs[0]

    def objective_communicates(self) -> bool:
        return self._trainer.step.communicates

    def reseed(self, replica: int, step: int) -> None:
        self._trainer.reseed(replica, step, self.local_replicas[0])

    def not_checkpointed(self) -> list[str]:
        return self._trainer.not_checkpointed()

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        self.local_index(replica)
        return weight_sharding.mark_local_slots(
            self._trainer.state.describe(kinds), self._trainer.update.is_local_slot
        )

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        if self._rate >= 0:
            self._trainer.update.note_learning_rate(self._rate)
        return self._trainer.state.read(kinds, self.local_index(replica))

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        index = None if replica is None else self.local_index(replica)
        self._update_due_averages()
        state = {name: value for name, value in state.items() if not self.is_remote(name)}
        late_state = metric_state(state, self._trainer.metrics.unbuilt)
        if late_state:
            self._late_metric_state.append((late_state, index))
        self._trainer.state.write(
            {name: value for name, value in state.items() if name not in late_state}, index
        )

    def is_remote(self, name: str) -> bool:
        return weight_sharding.is_remote(name, self._trainer.update.is_remote_slot)

    def _write_late_metric_state(self, batch: Batch) -> None:
        """Lets metrics create the variables that a saved state waits for, on samples that do not count."""
        entries, self._late_metric_state = self._late_metric_state, []

        def trace(has_placeholders: bool, micro_batches: MicroBatches, weights: Weights) -> None:
            trainer = self._trainer
            self._traced.on_replicas(
                lambda position: trainer.make_metrics(micro_batches[position][0]), trains=True
            )

        with self.preserving_training_state():
            self._traced.on_batch("make metrics", trace, batch)
        for state, index in entries:
            self._trainer.state.write(state, index)

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        return load_weight_arrays(path, self.model)

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        export.write(self.model, form, target, inputs, self._trainer.predict)

    def average_parameters(self) -> None:
        self._traced.function("average parameters", self._trace_average)()

    def _trace_average(self) -> None:
        def mean(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            return self._communicator.all_reduce(tensors, "mean")

        self._traced.on_replicas(lambda position: self._trainer.average_parameters(mean))

    def numpy(self, tensor: tf.Tensor) -> np.ndarray:
        return to_numpy(tensor)

    def snapshot_scalar(self, value: Any) -> Any:
        is_tensor = tf.is_tensor(value)
        return tf.reshape(value, ()) if is_tensor else super().snapshot_scalar(value)

    def barrier(self) -> None:
        ones = [tf.ones((), tf.float32) for _ in self.local_replicas]
        self.all_reduce(ones)[0].numpy()

    def synchronize_device(self) -> None:
        gpu.synchronize()

    def close(self) -> None:
        keras_weights.unlock_trainable(self.model)
        self.barrier()
        self._traced.forget()
        if self._is_first:
            if self._spec.reproducible:
                tf.config.optimizer.set_experimental_options({_REWRITES_SUMS: self._rewrites_sums})
            self._communicator.close()

    def _set_rate(self, rate: float) -> None:
        if rate != self._rate:
            self._rate = rate
            self._rate_tensor = tf.constant(rate, self._rate_dtype)

    def _on_batch(
        self, name: str, trace: Callable[..., Any], batch: Batch, *tensors: tf.Tensor
    ) -> Any:
        """Calls `TracedFunctions.on_batch` (`tensors` of any shape), after writing late metric state."""
        if self._late_metric_state:
            self._write_late_metric_state(batch)
        return self._traced.on_batch(name, trace, batch, *tensors)


def _part(batch: Batch, index: int) -> Batch:
    """The batch with one slice of each local replica."""
    return replace(batch, slices=tuple((each[index],) for each in batch.slices))


def _copy_averaged(replica: TensorFlowReplica) -> list[tf.Tensor]:
    """Computation that copies what averages of weights hold, in the shapes of the variables."""
    return [tf.identity(value) for value in replica.values(AVERAGED)]


def _move_average(
    replica: TensorFlowReplica, averages: Sequence[tf.Variable], weight: tf.Tensor
) -> None:
    """Computation that moves averages towards the variables, in their shapes, by a scalar weight."""
    for average, value in zip(averages, replica.values(AVERAGED), strict=True):
        tf.raw_ops.ResourceApplyGradientDescent(
            var=average.handle, alpha=tf.cast(weight, average.dtype), delta=average - value
        )
