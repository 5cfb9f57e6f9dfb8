"""Replica group of the reference backend, and the one replica of this process.

Arrays are NumPy's, of the spec's precision; NumPy computes at once, so no result is ever pending.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.plugin import (
    EXPOSED_EXCHANGE,
    MODEL_STATE,
    ActionTimer,
    Batch,
    Computation,
    ExecutedAction,
    LayerTrait,
    Phase,
    Reduction,
    Replica,
    ReplicaGroup,
    StateInfo,
    StateKind,
    StatePart,
    Subgroups,
    TrainingSpec,
    local_subgroup,
    map_tree,
    spans_of_range,
)
from isotrain.testing.reference.comm import Communicator
from isotrain.testing.reference.flatten import flatten, restored, unflatten_into
from isotrain.testing.reference.layers import Array
from isotrain.testing.reference.losses_and_metrics import mean
from isotrain.testing.reference.network import Network
from isotrain.testing.reference.tensor_ops import NumpyTensorOps
from isotrain.testing.reference.trainer import ReplicaTrainer


class ReferenceReplica(Replica):
    """Replica that reads and writes a trainer's arrays; collectives run at once.

    Vectors are 1-D: the parts or weights one after the other, in the widest of their dtypes.
    """

    ops = NumpyTensorOps()

    def __init__(self, trainer: ReplicaTrainer, communicator: Communicator) -> None:
        self.index = communicator.replica
        self.replicas = communicator.replicas
        self._trainer = trainer
        self._communicator = communicator

    def read(self, parts: Sequence[StatePart]) -> Array:
        return flatten(self._arrays(parts))

    def write(self, parts: Sequence[StatePart], vector: Array) -> None:
        unflatten_into(vector, self._arrays(parts))

    def read_weights(self, indices: Sequence[int]) -> Array:
        dtypes = [weight.dtype for weight in self._trainer.part("trainable")]
        return flatten(self._weights(indices)).astype(np.result_type(*dtypes))

    def write_weights(self, indices: Sequence[int], vector: Array) -> None:
        unflatten_into(vector, self._weights(indices))

    def read_range(self, start: int, stop: int) -> Array:
        spans = self._spans(start, stop)
        return np.concatenate([self.read_weights([]), *(flat[span] for flat, span in spans)])

    def write_range(self, start: int, vector: Array) -> None:
        for flat, span in self._spans(start, start + len(vector)):
            flat[span], vector = np.split(vector, [span.stop - span.start])

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Any, slice]]:
        """Iterators over the elements of weights, and what of them is in a range."""
        weights = self._trainer.part("trainable")
        for index, first, end in spans_of_range([each.size for each in weights], start, stop):
            yield weights[index].flat, slice(first, end)

    def _weights(self, indices: Sequence[int]) -> list[Array]:
        """Trainable weights at some indices, in their shapes."""
        weights = self._trainer.part("trainable")
        return [weights[index] for index in indices]

    def _arrays(self, parts: Sequence[StatePart]) -> list[Array]:
        """Arrays of parts of the state, in their shapes."""
        return [array for part in parts for array in self._trainer.part(part)]

    def all_gather(self, tensor: Array) -> Array:
        return self._communicator.all_gather(tensor)

    def all_reduce_within(self, tensor: Array, subgroups: Subgroups) -> Array:
        """Sums as by default; shapes may differ between subgroups. Collective."""
        subgroup = local_subgroup(self.index, subgroups) or (self.index,)
        return np.array(functools.reduce(np.add, self._communicator.gather(tensor, subgroup)))


class ReferenceGroup(ReplicaGroup):
    """Replica group with one local replica, computed in NumPy.

    Attributes:
        replica_type: Class of the replicas that computations get.
    """

    replica_type = ReferenceReplica

    def __init__(self, spec: TrainingSpec, communicator: Communicator) -> None:
        """Builds the trainer and broadcasts the initial weights of replica 0. Collective."""
        self.replicas = communicator.replicas
        self.local_replicas = (communicator.replica,)
        self._communicator = communicator
        self._trainer = ReplicaTrainer(spec, communicator.replica)
        self._keeps_gradients = False
        self._norm_parts: Sequence[Sequence[int]] | None = None
        self._gradient_norms: list[Array] = []
        self._is_sharded = False
        self._kept: list[Array] | None = None
        self._timer: ActionTimer | None = None
        weights = self._trainer.part("trainable") + self._trainer.part("statistics")
        unflatten_into(communicator.all_gather(flatten(weights))[0], weights)

    @property
    def model(self) -> Network:
        """The model of this process's replica."""
        return self._trainer.network

    def to_device(self, arrays: Any) -> Any:
        return map_tree(np.array, arrays)

    def gradients(self, batch: Batch) -> tuple[list[list[Array]], Array]:
        loss, gradients = self._trainer.contribution(batch.slices[0])
        return [gradients], self.all_reduce([loss], "mean")[0]

    def apply_gradients(self, gradients: Sequence[Sequence[Array]], learning_rate: float) -> None:
        if self._keeps_gradients:
            self._kept = [np.array(gradient) for gradient in gradients[0]]
        if self._norm_parts is not None:
            self._gradient_norms = [
                np.sqrt(sum(np.sum(gradients[0][index] ** 2) for index in part))
                for part in (range(len(gradients[0])), *self._norm_parts)
            ]
        self._trainer.update_by_all(gradients[0], learning_rate)

    def shard_optimizer(self, weights: Sequence[Sequence[int]]) -> None:
        self._is_sharded = True
        self._trainer.shard_optimizer(weights[0])

    def reduce_scatter_gradients(
        self, batch: Batch, reduction: Reduction
    ) -> tuple[list[list[Array]], Array]:
        ((local,), loss), replica = self.gradients(batch), self._replica()
        shard: list[Array] = []
        for bucket, static in zip(reduction.buckets, reduction.statics, strict=True):
            shard += reduction.reduce(replica, [local[index] for index in bucket], static=static)
        return [shard], loss

    def _replica(self) -> ReferenceReplica:
        return self.replica_type(self._trainer, self._communicator)

    def update_shard(
        self,
        gradients: Sequence[Sequence[Array]],
        learning_rate: float,
        norms: Sequence[Array] | None,
    ) -> None:
        norm = None if norms is None else float(norms[0])
        self._trainer.update(gradients[0], learning_rate, norm)

    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        self._trainer.set_group_rates(rates)

    def keep_gradients(self) -> bool:
        self._keeps_gradients = not self._is_sharded
        return self._keeps_gradients

    def kept_gradients(self) -> list[list[Array]]:
        assert self._kept is not None
        return [self._kept]

    def keep_gradient_norms(self, parts: Sequence[Sequence[int]]) -> None:
        self._norm_parts = parts

    def gradient_norms(self) -> list[Array]:
        return self._gradient_norms

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        options = {} if static is None else {"static": static}
        return [computation(self._replica(), *(value for (value,) in values), **options)]

    def set_action_timing(self, enabled: bool) -> None:
        if enabled and self._timer is None:
            self._timer = timer = ActionTimer(self)
            timer.time_calls(self._trainer, "_losses", "forward")
            timer.time_calls(self._trainer, "_forward_and_backward", "backward")
            if self.replicas > 1:
                timer.time_calls(self, "compute", EXPOSED_EXCHANGE)
            timer.time_calls(self, "apply_gradients", "update")
        if self._timer is not None:
            self._timer.enabled = enabled

    def last_actions(self) -> Sequence[ExecutedAction]:
        return () if self._timer is None else self._timer.executed

    def evaluation_step(self, batch: Batch) -> None:
        self._trainer.evaluate(batch.slices[0])

    def part_sums(self, batch: Batch) -> Iterator[list[list[Array]]]:
        trainer = self._trainer
        statistics = trainer.part("statistics")
        for micro_batch in batch.slices[0]:
            with restored([*statistics, trainer.metrics.sums]):
                trainer.metrics.reset()
                loss, gradients = trainer.contribution([micro_batch])
                weighted = [each * each.dtype.type(micro_batch.weight) for each in statistics]
                sums = [*gradients, loss, *weighted, trainer.metrics.sums.copy()]
            yield [sums]

    def evaluation_part_sums(self, batch: Batch) -> Iterator[list[list[Array]]]:
        accumulators = [self._trainer.losses, self._trainer.evaluated.sums]
        for micro_batch in batch.slices[0]:
            with restored(accumulators):
                for each in accumulators:
                    each[...] = 0
                self._trainer.evaluate([micro_batch])
                sums = [each.copy() for each in accumulators]
            yield [sums]

    def accumulate(self, sums: Sequence[Array], addends: Sequence[Array]) -> Sequence[Array]:
        return [total + addend for total, addend in zip(sums, addends, strict=True)]

    def add_part_sums(self, phase: Phase, sums: Sequence[Sequence[Array]]) -> None:
        trainer = self._trainer
        accumulators = [trainer.losses, trainer.evaluated.sums]
        if phase == "train":
            accumulators = [trainer.metrics.sums]
            for statistic, value in zip(trainer.part("statistics"), sums[0], strict=False):
                statistic[...] = value
        if self._communicator.replica == 0:
            for total, value in zip(accumulators, sums[0][-len(accumulators) :], strict=True):
                total += value

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        return [self._trainer.predict(replica_inputs) for replica_inputs in inputs]

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        trainer = self._trainer
        if phase == "train":
            sums = self.all_reduce([trainer.metrics.sums])[0]
            trainer.metrics.reset()
            return trainer.metrics.results(sums)
        sums = self.all_reduce([flatten([trainer.losses, trainer.evaluated.sums])])[0]
        trainer.losses[...] = 0
        trainer.evaluated.reset()
        return {"loss": mean(*sums[:2]), **trainer.evaluated.results(sums[2:])}

    def pop_metric_state(self) -> Array:
        sums = self._trainer.metrics.sums.copy()
        self._trainer.metrics.reset()
        return sums

    def add_metric_state(self, sums: Array) -> None:
        self._trainer.metrics.sums += sums

    def traits(self) -> list[LayerTrait]:
        return self._trainer.network.traits()

    def reseed(self, replica: int, step: int) -> None:
        self._trainer.reseed(replica, step)

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        arrays = self._named_arrays(kinds, replica)
        infos = {n: StateInfo(a.shape, a.dtype.name, a.nbytes) for n, a in arrays.items()}
        is_alone = self._trainer.is_alone
        return {n: i.on_this_replica_only() if is_alone(n) else i for n, i in infos.items()}

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, Array]:
        return {n: np.array(a) for n, a in self._named_arrays(kinds, replica).items()}

    def _named_arrays(self, kinds: Sequence[StateKind], replica: int | None) -> dict[str, Array]:
        """The trainer's own arrays of the kinds, any shape, by name; not copied."""
        self.local_index(replica)
        sections = [values for kind, values in self._trainer.state.items() if kind in kinds]
        return {n: array for values in sections for n, array in values.items()}

    def write_state(self, state: Mapping[str, Array], *, replica: int | None = None) -> None:
        self.local_index(replica)
        self._trainer.write(state)

    def is_remote(self, name: str) -> bool:
        return self._trainer.is_remote(name)

    def numpy(self, tensor: Array) -> Array:
        return np.array(tensor)

    def close(self) -> None:
        self._communicator.close()
