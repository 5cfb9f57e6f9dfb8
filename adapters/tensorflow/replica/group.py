"""The replica group of one TensorFlow process, over any strategy and exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters.common import sharding
from isotrain.adapters.common.notes import OWN_DENOMINATOR, notes
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.tensorflow.base.layer_traits import model_traits
from isotrain.adapters.tensorflow.base.private_api import copies
from isotrain.adapters.tensorflow.base.variable_init import InitialValues
from isotrain.adapters.tensorflow.comm.base import Communicator
from isotrain.adapters.tensorflow.replica.handle import TensorFlowReplica
from isotrain.adapters.tensorflow.replica.tracing import (
    MicroBatches,
    TracedFunctions,
    TracedMetrics,
    Weights,
    row,
)
from isotrain.adapters.tensorflow.trainer import export
from isotrain.adapters.tensorflow.trainer.base import ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.optimizer import Gradients
from isotrain.adapters.tensorflow.trainer.state import part_of, to_numpy
from isotrain.adapters.weight_files import load_weight_arrays
from isotrain.plugin import (
    MODEL_STATE,
    Batch,
    Computation,
    ExportForm,
    LayerTrait,
    Phase,
    Reduction,
    ReplicaGroup,
    StateInfo,
    StateKind,
    TrainingSpec,
    map_tree,
)

_WHOLE_NUMBERS = frozenset(
    {tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64}
)


class TensorFlowReplicaGroup(ReplicaGroup):
    """Local replicas under one `tf.distribute` strategy, driven by one traced function per step.

    Attributes:
        strategy: That strategy.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        strategy: tf.distribute.Strategy,
        communicator: Communicator,
        holder: tf.distribute.Strategy | InitialValues | None = None,
    ) -> None:
        """Builds the model on every local replica.

        Args:
            spec: What to train.
            strategy: Holds the local replicas; the default strategy where there is one.
            communicator: Ties them to all others.
            holder: Where the variables are to be created, if not by `strategy`.
        """
        self.strategy = strategy
        self._spec = spec
        self._communicator = communicator
        self.replicas = communicator.replicas
        self.local_replicas = communicator.local_replicas
        self._trainer = self._build(spec, (holder or strategy).scope)
        if isinstance(holder, InitialValues):
            holder.share()
        self._trainer.note_generators()
        self._rate_type = tf.float64 if spec.precision == "float64" else tf.float32
        on_host = not tf.config.list_logical_devices("GPU")
        self._placed_types = {*_WHOLE_NUMBERS, self._rate_type} if on_host else set()
        self._rate = -1.0
        self._rate_tensor = tf.constant(self._rate, self._rate_type)
        self._traced = TracedFunctions(strategy, communicator, self._trainer.use_default_generator)
        self._metrics = TracedMetrics(self._trainer, self._traced, self._totals)
        self._late: list[tuple[dict[str, np.ndarray], int | None]] = []
        self._updates_own = False

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
        """What is traced."""
        return self._trainer

    def to_device(self, arrays: Any) -> Any:
        return map_tree(tf.constant, arrays)  # quicker than convert_to_tensor and tf.nest

    def is_on_device(self, value: Any) -> bool:
        return isinstance(value, tf.Tensor) and value.dtype in self._placed_types

    def optimizer_lr_schedule(self) -> Callable[[int], float] | None:
        return self._trainer.update.optimizer_lr_schedule

    def weight_finalizer(self) -> Callable[[], None] | None:
        return self._trainer.update.weight_finalizer()

    def synchronous_step(self, batch: Batch, learning_rate: float) -> tf.Tensor:
        if learning_rate != self._rate:
            self._set_rate(learning_rate)
        return self._on_batch("step", self._trace_step, batch, self._rate_tensor)

    def _trace_step(
        self, holes: bool, micro_batches: MicroBatches, weights: Weights, rate: tf.Tensor
    ) -> tf.Tensor:
        def replica(position: int) -> tf.Tensor:
            trainer, own = self._trainer, row(weights, position)
            loss, gradients = trainer.contribution(micro_batches[position], own, holes, self._total)
            share = None if own is None else tf.reduce_sum(own)
            loss, gradients = self._reduced(loss, gradients, share)
            trainer.update.apply(gradients)
            return loss

        with self._trainer.update.learning_rate(rate):
            return self._traced.on_replicas(replica, trains=True)[0]

    def _reduced(
        self, loss: tf.Tensor, gradients: Gradients, share: tf.Tensor | None
    ) -> tuple[tf.Tensor, Gradients]:
        """Exchanges loss, gradients and moving statistics together; sets the latter."""
        if self.replicas == 1:
            return loss, gradients
        trainer = self._trainer
        present = [gradient for gradient in gradients if gradient is not None]
        statistics = trainer.weighted_statistics(share)
        loss, *means = self._communicator.all_reduce([loss, *present, *statistics], "mean")
        trainer.agree_on_statistics(means[len(present) :])
        reduced = iter(means)
        return loss, [None if gradient is None else next(reduced) for gradient in gradients]

    def local_step(self, batch: Batch, learning_rate: float) -> tf.Tensor:
        self._set_rate(learning_rate)
        return self._on_batch("local step", self._trace_local_step, batch, self._rate_tensor)

    def _trace_local_step(
        self, holes: bool, micro_batches: MicroBatches, weights: Weights, rate: tf.Tensor
    ) -> tf.Tensor:
        def replica(position: int) -> tf.Tensor:
            trainer, own = self._trainer, row(weights, position)
            loss, gradients = trainer.contribution(
                micro_batches[position], own, holes, self._total, local=True
            )
            if own is not None and holes:
                trainer.update.apply_unless(tf.equal(tf.reduce_sum(own), 0), gradients)
            else:
                trainer.update.apply(gradients)
            return self._mean(loss)

        with self._trainer.update.learning_rate(rate):
            return self._traced.on_replicas(replica, trains=True)[0]

    def _mean(self, value: tf.Tensor) -> tf.Tensor:
        return self._communicator.all_reduce([value], "mean")[0]

    def _total(self, value: tf.Tensor) -> tf.Tensor:
        return self._communicator.all_reduce([value], "sum")[0]

    def _totals(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over all processes."""
        return self._communicator.all_reduce(tensors, "sum")

    def gradients(self, batch: Batch) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
        results = self._on_batch("gradients", self._trace_gradients, batch)
        return [list(gradients) for gradients, _ in results], results[0][1]

    def _trace_gradients(self, holes: bool, micro_batches: MicroBatches, weights: Weights) -> Any:
        def replica(position: int) -> tuple[list[tf.Tensor], tf.Tensor]:
            own = row(weights, position)
            loss, gradients = self._trainer.contribution(
                micro_batches[position], own, holes, self._total
            )
            return self._trainer.update.unscaled(gradients), self._mean(loss)

        return self._traced.on_replicas(replica, trains=True)

    def apply_gradients(
        self, gradients: Sequence[Sequence[tf.Tensor]], learning_rate: float
    ) -> None:
        self._set_rate(learning_rate)
        given = [list(own) for own in gradients]
        self._traced.function("apply", self._trace_apply)(given, self._rate_tensor)

    def _trace_apply(self, gradients: list[list[tf.Tensor]], rate: tf.Tensor) -> None:
        def replica(position: int) -> None:
            update = self._trainer.update
            update.apply([update.scaled(gradient) for gradient in gradients[position]])

        with self._trainer.update.learning_rate(rate):
            self._traced.on_replicas(replica)

    def shard_optimizer(self, weights: Sequence[Sequence[int]]) -> None:
        self._updates_own = True
        (own,) = weights  # variables of several replicas in a process have the same slots on each
        self._trainer.update.shard_optimizer(own)

    def reduce_scatter_gradients(
        self, batch: Batch, reduction: Reduction
    ) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
        def trace(holes: bool, micro_batches: MicroBatches, weights: Weights) -> Any:
            return self._trace_reduced(reduction, holes, micro_batches, weights)

        results = self._on_batch(f"reduced gradients, {reduction.each_slice}", trace, batch)
        return [list(kept) for kept, _, _ in results], results[0][1]

    def _trace_reduced(
        self, reduction: Reduction, holes: bool, micro_batches: MicroBatches, weights: Weights
    ) -> Any:
        def replica(position: int) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
            seen, own = TensorFlowReplica(self._trainer, self._communicator), row(weights, position)

            def take(gradients: Gradients) -> Gradients:
                dense, kept = self._trainer.update.unscaled(gradients), []
                for bucket, static in zip(reduction.buckets, reduction.statics, strict=True):
                    given = [dense[place] for place in bucket]
                    kept += reduction.reduce(seen, given, static=static)
                return kept

            each = take if reduction.each_slice else list
            loss, sums = self._trainer.contribution(
                micro_batches[position], own, holes, self._total, take=each
            )
            kept = sums if reduction.each_slice else take(sums)
            return kept, self._mean(loss), seen.keepalive_outputs

        return self._traced.on_replicas(replica, trains=True)

    def update_shard(
        self,
        gradients: Sequence[Sequence[tf.Tensor]],
        learning_rate: float,
        norms: Sequence[tf.Tensor] | None,
    ) -> None:
        self._set_rate(learning_rate)
        given = [list(own) for own in gradients]
        function = self._traced.function("update own", self._trace_update_own)
        function(given, None if norms is None else list(norms), self._rate_tensor)

    def _trace_update_own(
        self, gradients: list[list[tf.Tensor]], norms: list[tf.Tensor] | None, rate: tf.Tensor
    ) -> None:
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
        if self._updates_own:
            return False
        self._trainer.update.keep_gradients(self.strategy.scope)
        self._traced.forget()  # what was traced before keeps nothing
        return True

    def kept_gradients(self) -> list[list[tf.Tensor]]:
        variables = [copies(variable) for variable in self._trainer.update.kept]
        if not variables:
            return super().kept_gradients()
        return [[tf.identity(value) for value in own] for own in zip(*variables, strict=True)]

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        options = {} if static is None else {"static": static}

        def trace(*given: Sequence[Any]) -> list[Any]:
            def replica(position: int) -> tuple[Any, list[tf.Tensor]]:
                seen = TensorFlowReplica(self._trainer, self._communicator)
                own = [value[position] for value in given]
                return computation(seen, *own, **options), seen.keepalive_outputs

            return self._traced.on_replicas(replica)

        function = self._traced.function(("compute", computation, static), trace)
        return [found for found, _ in function(*map(list, values))]

    def evaluation_step(self, batch: Batch) -> None:
        self._trainer.metrics.ensure_built()
        self._traced.on_counts(self._trace_evaluation, batch)

    def _trace_evaluation(
        self, holes: bool, micro_batches: MicroBatches, counts: tf.Tensor
    ) -> None:
        def replica(position: int) -> None:
            self._trainer.evaluate(micro_batches[position], counts[position], holes)

        self._traced.on_replicas(replica)

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        return self._traced.function("predict", self._trace_predictions)(list(inputs))

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
        unalike = []

        def trace(holes: bool, micro_batches: MicroBatches, weights: Weights) -> None:
            trainer = self._trainer
            self._traced.on_replicas(
                lambda own: unalike.append(trainer.has_own_denominator(micro_batches[own][0]))
            )

        self._traced.only_trace(trace, batch)
        return [OWN_DENOMINATOR] if any(unalike) else []

    def reseed(self, replica: int, step: int) -> None:
        self._trainer.reseed(replica, step, self.local_replicas[0])

    def not_checkpointed(self) -> list[str]:
        return self._trainer.not_checkpointed()

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        self.local_index(replica)
        return sharding.mark_local_slots(
            self._trainer.state.describe(kinds), self._trainer.update.is_local_slot
        )

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        if self._rate >= 0:
            self._trainer.update.note_learning_rate(self._rate)
        return self._trainer.state.read(kinds, self.local_index(replica))

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        place = None if replica is None else self.local_index(replica)
        state = {n: value for n, value in state.items() if not self.is_remote(n)}
        late = part_of(state, self._trainer.metrics.unbuilt)
        if late:
            self._late.append((late, place))
        self._trainer.state.write({n: v for n, v in state.items() if n not in late}, place)

    def is_remote(self, name: str) -> bool:
        return sharding.is_remote(name, self._trainer.update.is_remote_slot)

    def _write_late(self, batch: Batch) -> None:
        """Has metrics make the variables that a state was written for, by samples that do not count."""
        late, self._late = self._late, []

        def trace(holes: bool, micro_batches: MicroBatches, weights: Weights) -> None:
            trainer = self._trainer
            self._traced.on_replicas(
                lambda own: trainer.make_metrics(micro_batches[own][0]), trains=True
            )

        with self.preserving_training_state():
            self._traced.on_batch("make metrics", trace, batch)
        for state, place in late:
            self._trainer.state.write(state, place)

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        return load_weight_arrays(path, self.model)

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        export.write(self.model, form, target, inputs)

    def average_parameters(self) -> None:
        self._traced.function("average parameters", self._trace_average)()

    def _trace_average(self) -> None:
        def mean(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            return self._communicator.all_reduce(tensors, "mean")

        self._traced.on_replicas(lambda position: self._trainer.average_parameters(mean))

    def tensor(self, array: np.ndarray) -> tf.Tensor:
        return tf.convert_to_tensor(array)

    def numpy(self, tensor: tf.Tensor) -> np.ndarray:
        return to_numpy(tensor)

    def barrier(self) -> None:
        ones = [tf.ones((), tf.float32) for _ in self.local_replicas]
        self.all_reduce(ones)[0].numpy()

    def synchronize_device(self) -> None:
        if tf.config.list_logical_devices("GPU"):
            tf.test.experimental.sync_devices()

    def close(self) -> None:
        keras_model.unlock_trainable(self.model)
        self.barrier()
        self._traced.forget()
        self._communicator.close()

    def _set_rate(self, rate: float) -> None:
        if rate != self._rate:
            self._rate = rate
            self._rate_tensor = tf.constant(rate, self._rate_type)

    def _on_batch(
        self, name: str, trace: Callable[..., Any], batch: Batch, *tensors: tf.Tensor
    ) -> Any:
        """As `Traced.on_batch`, once state is there that waited for metrics to see their first samples."""
        if self._late:
            self._write_late(batch)
        return self._traced.on_batch(name, trace, batch, *tensors)
