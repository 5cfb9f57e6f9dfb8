"""Replica group of the reference backend: the one replica of this process.

Arrays are NumPy's, of the spec's precision; NumPy computes at once, so no result is ever pending.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
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
from isotrain.testing.reference.flatten import flatten, unflatten_into
from isotrain.testing.reference.layers import Array
from isotrain.testing.reference.losses_and_metrics import mean
from isotrain.testing.reference.network import Network
from isotrain.testing.reference.replica import ReferenceReplica
from isotrain.testing.reference.trainer import ReplicaTrainer


class ReferenceGroup(ReplicaGroup):
    """Replica group with one local replica, computed in NumPy.

    Attributes:
        replica_type: Class of the replicas that computations get.
    """

    replica_type = ReferenceReplica

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
        return map_tree(np.array, arrays)

    def gradients(self, batch: Batch) -> tuple[list[list[Array]], Array]:
        loss, gradients = self._program.contribution(batch.slices[0])
        return [gradients], self.all_reduce([loss], "mean")[0]

    def apply_gradients(self, gradients: Sequence[Sequence[Array]], learning_rate: float) -> None:
        if self._keeps:
            self._kept = [np.array(gradient) for gradient in gradients[0]]
        self._program.update(gradients[0], learning_rate)

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
        return self.replica_type(self._program, self._exchange)

    def update_shard(
        self,
        gradients: Sequence[Sequence[Array]],
        learning_rate: float,
        norms: Sequence[Array] | None,
    ) -> None:
        norm = None if norms is None else float(norms[0])
        self._program.update(gradients[0], learning_rate, norm)

    def keep_gradients(self) -> bool:
        self._keeps = not self._updates_own
        return self._keeps

    def kept_gradients(self) -> list[list[Array]]:
        assert self._kept is not None
        return [self._kept]

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
            sums = self.all_reduce([trainer.metrics.sums])[0]
            trainer.metrics.reset()
            return trainer.metrics.results(sums)
        sums = self.all_reduce([flatten([trainer.losses, trainer.evaluated.sums])])[0]
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
        infos = super().describe_state(kinds, replica=replica).items()
        is_alone = self._program.is_alone
        return {n: info.on_this_replica_only() if is_alone(n) else info for n, info in infos}

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, Array]:
        self.local_index(replica)
        sections = [values for kind, values in self._program.state.items() if kind in kinds]
        return {n: np.array(value) for values in sections for n, value in values.items()}

    def write_state(self, state: Mapping[str, Array], *, replica: int | None = None) -> None:
        self.local_index(replica)
        self._program.write(state)

    def is_remote(self, name: str) -> bool:
        return self._program.is_remote(name)

    def numpy(self, tensor: Array) -> Array:
        return np.array(tensor)

    def close(self) -> None:
        self._exchange.close()
