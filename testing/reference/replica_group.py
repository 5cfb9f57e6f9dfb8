"""Replica group of the reference backend: the one replica of this process.

Arrays are NumPy's, of the spec's precision; NumPy computes at once, so no result is ever pending.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.plugin import (
    MODEL_STATE,
    Batch,
    Computation,
    LayerTrait,
    Phase,
    Reduction,
    ReplicaGroup,
    StateInfo,
    StateKind,
    TrainingSpec,
    map_tree,
)
from isotrain.testing.reference.comm import Communicator
from isotrain.testing.reference.flatten import flatten, unflatten_into, unflatten_like
from isotrain.testing.reference.layers import Array
from isotrain.testing.reference.losses_and_metrics import mean
from isotrain.testing.reference.network import Network
from isotrain.testing.reference.replica import ReferenceReplica
from isotrain.testing.reference.trainer import ReplicaTrainer


class ReferenceGroup(ReplicaGroup):
    """Replica group with one local replica, computed in NumPy."""

    def __init__(self, spec: TrainingSpec, exchange: Communicator) -> None:
        """Builds the trainer and broadcasts the initial weights of replica 0. Collective.

        Args:
            spec: Training spec.
            exchange: Communicator, connected to the other replicas.
        """
        self.replicas = exchange.replicas
        self.local_replicas = (exchange.replica,)
        self._exchange = exchange
        self._program = ReplicaTrainer(spec, exchange.replica)
        self._dtype = np.dtype(spec.precision)
        self._keeps = False
        self._updates_own = False
        self._kept: list[Array] | None = None
        weights = self._program.part("trainable") + self._program.part("statistics")
        unflatten_into(exchange.all_gather(flatten(weights))[0], weights)

    @property
    def model(self) -> Network:
        """The model of this process's replica."""
        return self._program.network

    def to_device(self, arrays: Any) -> Any:
        return map_tree(self._typed, arrays)

    def _typed(self, array: Array) -> Array:
        """Floating-point array of any shape in the spec's precision; other arrays unchanged."""
        return array.astype(self._dtype, copy=False) if array.dtype.kind == "f" else array

    def synchronous_step(self, batch: Batch, learning_rate: float) -> Array:
        loss, gradients = self._program.contribution(batch.slices[0])
        # One all-reduce: the loss (scalar), the gradients (shapes of the weights) and the moving statistics.
        statistics, weight = self._program.part("statistics"), _share(batch)
        local = [loss, *gradients, *(moving * weight for moving in statistics)]
        mean_loss, *means = unflatten_like(self._exchange.all_reduce(flatten(local), "mean"), local)
        unflatten_into(flatten(means[len(gradients) :]), statistics)
        self._update(means[: len(gradients)], learning_rate)
        return mean_loss

    def local_step(self, batch: Batch, learning_rate: float) -> Array:
        loss, gradients = self._program.contribution(batch.slices[0])
        weight = _share(batch)
        if weight:
            local_mean = [(gradient / weight).astype(self._dtype) for gradient in gradients]
            self._update(local_mean, learning_rate)
        return self._exchange.all_reduce(loss, "mean")

    def gradients(self, batch: Batch) -> tuple[list[list[Array]], Array]:
        loss, gradients = self._program.contribution(batch.slices[0])
        return [gradients], self._exchange.all_reduce(loss, "mean")

    def apply_gradients(self, gradients: Sequence[Sequence[Array]], learning_rate: float) -> None:
        self._update(gradients[0], learning_rate)

    def _update(self, gradients: Sequence[Array], rate: float) -> None:
        """Applies gradients, of the weights' shapes; keeps them for `kept_gradients` if asked to."""
        if self._keeps:
            self._kept = [np.array(gradient) for gradient in gradients]
        self._program.update(gradients, rate)

    def shard_optimizer(self, weights: Sequence[Sequence[int]]) -> None:
        self._updates_own = True
        self._program.shard_optimizer(weights[0])

    def reduce_scatter_gradients(
        self, batch: Batch, reduction: Reduction
    ) -> tuple[list[list[Array]], Array]:
        ((local,), loss), replica = self.gradients(batch), self._replica()
        shard: list[Array] = []
        for bucket, static in zip(reduction.buckets, reduction.statics, strict=True):
            shard += reduction.reduce(replica, [local[index] for index in bucket], static=static)
        return [shard], loss

    def _replica(self) -> ReferenceReplica:
        return ReferenceReplica(self._program, self._exchange)

    def update_shard(
        self,
        gradients: Sequence[Sequence[Array]],
        learning_rate: float,
        norms: Sequence[Array] | None,
    ) -> None:
        norm = None if norms is None else float(norms[0])
        self._program.update(gradients[0], learning_rate, norm)

    @contextlib.contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        sums = self._program.metrics.sums.copy()
        try:
            with super().preserving_training_state():
                yield
        finally:
            self._program.metrics.sums[...] = sums

    def keep_gradients(self) -> bool:
        self._keeps = not self._updates_own
        return self._keeps

    def kept_gradients(self) -> list[list[Array]]:
        return super().kept_gradients() if self._kept is None else [self._kept]

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        options = {} if static is None else {"static": static}
        return [computation(self._replica(), *(value for (value,) in values), **options)]

    def evaluation_step(self, batch: Batch) -> None:
        self._program.evaluate(batch.slices[0])

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        return [self._program.predict(replica_inputs) for replica_inputs in inputs]

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        trainer = self._program
        if phase == "train":
            sums = self._exchange.all_reduce(trainer.metrics.sums)
            trainer.metrics.reset()
            return trainer.metrics.results(sums)
        sums = self._exchange.all_reduce(flatten([trainer.losses, trainer.evaluated.sums]))
        trainer.losses[...] = 0
        trainer.evaluated.reset()
        return {"loss": mean(*sums[:2]), **trainer.evaluated.results(sums[2:])}

    def pop_metric_state(self) -> Array:
        sums = self._program.metrics.sums.copy()
        self._program.metrics.reset()
        return sums

    def add_metric_state(self, sums: Array) -> None:
        self._program.metrics.sums += sums

    def traits(self) -> list[LayerTrait]:
        return self._program.network.traits()

    def reseed(self, replica: int, step: int) -> None:
        self._program.reseed(replica, step)

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        return {name: self._described(name, value) for name, value in self._named(kinds, replica)}

    def _described(self, name: str, value: Array) -> StateInfo:
        """Shape, dtype and size of a named array."""
        info = StateInfo(value.shape, value.dtype.name, value.nbytes)
        return info.on_this_replica_only() if self._program.is_alone(name) else info

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, Array]:
        return {name: np.array(value) for name, value in self._named(kinds, replica)}

    def _named(
        self, kinds: Sequence[StateKind], replica: int | None
    ) -> Iterator[tuple[str, Array]]:
        """Named arrays of these kinds, in their shapes, not copied."""
        self.local_index(replica)
        for kind, values in self._program.state.items():
            if kind in kinds:
                yield from values.items()

    def write_state(self, state: Mapping[str, Array], *, replica: int | None = None) -> None:
        self.local_index(replica)
        self._program.write(state)

    def is_remote(self, name: str) -> bool:
        return self._program.is_remote(name)

    def average_parameters(self) -> None:
        weights = self._program.part("trainable")
        unflatten_into(self._exchange.all_reduce(flatten(weights), "mean"), weights)

    def tensor(self, array: Array) -> Array:
        return np.array(array)

    def numpy(self, tensor: Array) -> Array:
        return np.array(tensor)

    def barrier(self) -> None:
        self._exchange.barrier()

    def synchronize_device(self) -> None:
        """Does nothing: NumPy has finished when a call returns. Local."""

    def close(self) -> None:
        self._exchange.close()


def _share(batch: Batch) -> float:
    """Weight of this replica: its fraction of the global batch, times the number of replicas; a scalar."""
    return sum(micro_batch.weight for micro_batch in batch.slices[0])
