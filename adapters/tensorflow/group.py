"""The replica group of one TensorFlow process, over any strategy and exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters import own_slots, portable
from isotrain.adapters.remarks import UNALIKE, remarks
from isotrain.adapters.tensorflow import exports
from isotrain.adapters.tensorflow.exchange import Exchange
from isotrain.adapters.tensorflow.first_values import FirstValues
from isotrain.adapters.tensorflow.private import copies
from isotrain.adapters.tensorflow.program import Program
from isotrain.adapters.tensorflow.replica import TensorFlowReplica
from isotrain.adapters.tensorflow.state import part_of, to_numpy
from isotrain.adapters.tensorflow.traced_metrics import TracedMetrics
from isotrain.adapters.tensorflow.tracing import Pieces, Traced, Weights, row
from isotrain.adapters.tensorflow.traits import model_traits
from isotrain.adapters.tensorflow.weight_update import Gradients
from isotrain.adapters.weight_files import weights_in
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
        exchange: Exchange,
        holder: tf.distribute.Strategy | FirstValues | None = None,
    ) -> None:
        """Builds the model on every local replica.

        Args:
            spec: What to train.
            strategy: Holds the local replicas; the default strategy where there is one.
            exchange: Ties them to all others.
            holder: Where the variables are to be created, if not by `strategy`.
        """
        self.strategy = strategy
        self._spec = spec
        self._exchange = exchange
        self.replicas = exchange.replicas
        self.local_replicas = exchange.local_replicas
        self._program = self._build(spec, (holder or strategy).scope)
        if isinstance(holder, FirstValues):
            holder.share()
        self._program.note_generators()
        self._rate_type = tf.float64 if spec.precision == "float64" else tf.float32
        on_host = not tf.config.list_logical_devices("GPU")
        self._placed_types = {*_WHOLE_NUMBERS, self._rate_type} if on_host else set()
        self._rate = -1.0
        self._rate_tensor = tf.constant(self._rate, self._rate_type)
        self._traced = Traced(strategy, exchange, self._program.draw_unseeded)
        self._metrics = TracedMetrics(self._program, self._traced, self._totals)
        self._late: list[tuple[dict[str, np.ndarray], int | None]] = []
        self._updates_own = False

    def _build(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> Program:
        return Program(spec, scope)

    @property
    def model(self) -> Any:
        """The model; under a strategy with several local replicas its weights are mirrored."""
        return self._program.model

    @property
    def program(self) -> Program:
        """What is traced."""
        return self._program

    def place(self, arrays: Any) -> Any:
        return map_tree(tf.constant, arrays)  # quicker than convert_to_tensor and tf.nest

    def is_placed(self, value: Any) -> bool:
        return isinstance(value, tf.Tensor) and value.dtype in self._placed_types

    def own_rates(self) -> Callable[[int], float] | None:
        return self._program.update.own_rates

    def weight_finaliser(self) -> Callable[[], None] | None:
        return self._program.update.weight_finaliser()

    def synchronised_step(self, batch: Batch, learning_rate: float) -> tf.Tensor:
        if learning_rate != self._rate:
            self._set_rate(learning_rate)
        return self._on_batch("step", self._trace_step, batch, self._rate_tensor)

    def _trace_step(
        self, holes: bool, pieces: Pieces, weights: Weights, rate: tf.Tensor
    ) -> tf.Tensor:
        def replica(position: int) -> tf.Tensor:
            program, own = self._program, row(weights, position)
            loss, gradients = program.contribution(pieces[position], own, holes, self._total)
            share = None if own is None else tf.reduce_sum(own)
            loss, gradients = self._reduced(loss, gradients, share)
            program.update.apply(gradients)
            return loss

        with self._program.update.learning_rate(rate):
            return self._traced.on_replicas(replica, trains=True)[0]

    def _reduced(
        self, loss: tf.Tensor, gradients: Gradients, share: tf.Tensor | None
    ) -> tuple[tf.Tensor, Gradients]:
        """Exchanges loss, gradients and moving statistics together; sets the latter."""
        if self.replicas == 1:
            return loss, gradients
        program = self._program
        present = [gradient for gradient in gradients if gradient is not None]
        statistics = program.weighted_statistics(share)
        loss, *means = self._exchange.all_reduce([loss, *present, *statistics], "mean")
        program.agree_on_statistics(means[len(present) :])
        reduced = iter(means)
        return loss, [None if gradient is None else next(reduced) for gradient in gradients]

    def local_step(self, batch: Batch, learning_rate: float) -> tf.Tensor:
        self._set_rate(learning_rate)
        return self._on_batch("local step", self._trace_local_step, batch, self._rate_tensor)

    def _trace_local_step(
        self, holes: bool, pieces: Pieces, weights: Weights, rate: tf.Tensor
    ) -> tf.Tensor:
        def replica(position: int) -> tf.Tensor:
            program, own = self._program, row(weights, position)
            loss, gradients = program.contribution(
                pieces[position], own, holes, self._total, local=True
            )
            if own is not None and holes:
                program.update.apply_unless(tf.equal(tf.reduce_sum(own), 0), gradients)
            else:
                program.update.apply(gradients)
            return self._mean(loss)

        with self._program.update.learning_rate(rate):
            return self._traced.on_replicas(replica, trains=True)[0]

    def _mean(self, value: tf.Tensor) -> tf.Tensor:
        return self._exchange.all_reduce([value], "mean")[0]

    def _total(self, value: tf.Tensor) -> tf.Tensor:
        return self._exchange.all_reduce([value], "sum")[0]

    def _totals(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over all processes."""
        return self._exchange.all_reduce(tensors, "sum")

    def gradients(self, batch: Batch) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
        results = self._on_batch("gradients", self._trace_gradients, batch)
        return [list(gradients) for gradients, _ in results], results[0][1]

    def _trace_gradients(self, holes: bool, pieces: Pieces, weights: Weights) -> Any:
        def replica(position: int) -> tuple[list[tf.Tensor], tf.Tensor]:
            own = row(weights, position)
            loss, gradients = self._program.contribution(pieces[position], own, holes, self._total)
            return self._program.update.unscaled(gradients), self._mean(loss)

        return self._traced.on_replicas(replica, trains=True)

    def apply(self, gradients: Sequence[Sequence[tf.Tensor]], learning_rate: float) -> None:
        self._set_rate(learning_rate)
        given = [list(own) for own in gradients]
        self._traced.function("apply", self._trace_apply)(given, self._rate_tensor)

    def _trace_apply(self, gradients: list[list[tf.Tensor]], rate: tf.Tensor) -> None:
        def replica(position: int) -> None:
            update = self._program.update
            update.apply([update.scaled(gradient) for gradient in gradients[position]])

        with self._program.update.learning_rate(rate):
            self._traced.on_replicas(replica)

    def keep_slots_of(self, weights: Sequence[Sequence[int]]) -> None:
        self._updates_own = True
        (own,) = weights  # variables of several replicas in a process have the same slots on each
        self._program.update.keep_slots_of(own)

    def reduced_gradients(
        self, batch: Batch, reduction: Reduction
    ) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
        def trace(holes: bool, pieces: Pieces, weights: Weights) -> Any:
            return self._trace_reduced(reduction, holes, pieces, weights)

        results = self._on_batch(f"reduced gradients, {reduction.each_slice}", trace, batch)
        return [list(kept) for kept, _, _ in results], results[0][1]

    def _trace_reduced(
        self, reduction: Reduction, holes: bool, pieces: Pieces, weights: Weights
    ) -> Any:
        def replica(position: int) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
            seen, own = TensorFlowReplica(self._program, self._exchange), row(weights, position)

            def take(gradients: Gradients) -> Gradients:
                dense, kept = self._program.update.unscaled(gradients), []
                for bucket, static in zip(reduction.buckets, reduction.statics, strict=True):
                    given = [dense[place] for place in bucket]
                    kept += reduction.reduce(seen, given, static=static)
                return kept

            each = take if reduction.each_slice else list
            loss, sums = self._program.contribution(
                pieces[position], own, holes, self._total, take=each
            )
            kept = sums if reduction.each_slice else take(sums)
            return kept, self._mean(loss), seen.proofs

        return self._traced.on_replicas(replica, trains=True)

    def update_own(
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
            self._program.update.apply_own(gradients[position], norm)

        with self._program.update.learning_rate(rate):
            self._traced.on_replicas(replica)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        with self._program.undisturbed():
            yield

    @contextlib.contextmanager
    def unmoved(self) -> Iterator[None]:
        with self._program.unmoved():
            yield

    def keep_gradients(self) -> bool:
        if self._updates_own:
            return False
        self._program.update.keep_gradients(self.strategy.scope)
        self._traced.forget()  # what was traced before keeps nothing
        return True

    def kept_gradients(self) -> list[list[tf.Tensor]]:
        variables = [copies(variable) for variable in self._program.update.kept]
        if not variables:
            return super().kept_gradients()
        return [[tf.identity(value) for value in own] for own in zip(*variables, strict=True)]

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        options = {} if static is None else {"static": static}

        def trace(*given: Sequence[Any]) -> list[Any]:
            def replica(position: int) -> tuple[Any, list[tf.Tensor]]:
                seen = TensorFlowReplica(self._program, self._exchange)
                own = [value[position] for value in given]
                return computation(seen, *own, **options), seen.proofs

            return self._traced.on_replicas(replica)

        function = self._traced.function(("compute", computation, static), trace)
        return [found for found, _ in function(*map(list, values))]

    def evaluation_step(self, batch: Batch) -> None:
        self._program.measures.make_ready()
        self._traced.on_counts(self._trace_evaluation, batch)

    def _trace_evaluation(self, holes: bool, pieces: Pieces, counts: tf.Tensor) -> None:
        def replica(position: int) -> None:
            self._program.evaluate(pieces[position], counts[position], holes)

        self._traced.on_replicas(replica)

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        return self._traced.function("predict", self._trace_predictions)(list(inputs))

    def _trace_predictions(self, inputs: list[Any]) -> list[Any]:
        return self._traced.on_replicas(lambda position: self._program.predict(inputs[position]))

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        if phase == "evaluation":
            self._program.measures.make_ready()
        return self._metrics.collect(phase)

    def take_metrics(self) -> np.ndarray:
        return self._metrics.take()

    def add_metrics(self, sums: np.ndarray) -> None:
        self._metrics.add(sums)

    def traits(self) -> list[LayerTrait]:
        return model_traits(self.model, self._spec.precision)

    def remarks(self) -> list[str]:
        return remarks(self._spec, "tensorflow", self.traits())

    def step_remarks(self, batch: Batch) -> list[str]:
        unalike = []

        def trace(holes: bool, pieces: Pieces, weights: Weights) -> None:
            program = self._program
            self._traced.on_replicas(
                lambda own: unalike.append(program.counts_unalike(pieces[own][0]))
            )

        self._traced.only_trace(trace, batch)
        return [UNALIKE] if any(unalike) else []

    def draw_anew(self, replica: int, step: int) -> None:
        self._program.draw_anew(replica, step, self.local_replicas[0])

    def not_carried(self) -> list[str]:
        return self._program.not_carried()

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        self.place_of(replica)
        return own_slots.as_held(self._program.state.describe(kinds), self._program.update.is_alone)

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        if self._rate >= 0:
            self._program.update.note_learning_rate(self._rate)
        return self._program.state.read(kinds, self.place_of(replica))

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        place = None if replica is None else self.place_of(replica)
        state = {n: value for n, value in state.items() if not self.lives_elsewhere(n)}
        late = part_of(state, self._program.measures.late)
        if late:
            self._late.append((late, place))
        self._program.state.write({n: v for n, v in state.items() if n not in late}, place)

    def lives_elsewhere(self, name: str) -> bool:
        return own_slots.lives_elsewhere(name, self._program.update.is_elsewhere)

    def _write_late(self, batch: Batch) -> None:
        """Has metrics make the variables that a state was written for, by samples that do not count."""
        late, self._late = self._late, []

        def trace(holes: bool, pieces: Pieces, weights: Weights) -> None:
            program = self._program
            self._traced.on_replicas(lambda own: program.make_metrics(pieces[own][0]), trains=True)

        with self.undisturbed():
            self._traced.on_batch("make metrics", trace, batch)
        for state, place in late:
            self._program.state.write(state, place)

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        return weights_in(path, self.model)

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        exports.write(self.model, form, target, inputs)

    def average_parameters(self) -> None:
        self._traced.function("average parameters", self._trace_average)()

    def _trace_average(self) -> None:
        def mean(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            return self._exchange.all_reduce(tensors, "mean")

        self._traced.on_replicas(lambda position: self._program.average_parameters(mean))

    def tensor(self, array: np.ndarray) -> tf.Tensor:
        return tf.convert_to_tensor(array)

    def numpy(self, tensor: tf.Tensor) -> np.ndarray:
        return to_numpy(tensor)

    def barrier(self) -> None:
        ones = [tf.ones((), tf.float32) for _ in self.local_replicas]
        self.all_reduce(ones)[0].numpy()

    def synchronise_device(self) -> None:
        if tf.config.list_logical_devices("GPU"):
            tf.test.experimental.sync_devices()

    def close(self) -> None:
        portable.release_trainable(self.model)
        self.barrier()
        self._traced.forget()
        self._exchange.close()

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
