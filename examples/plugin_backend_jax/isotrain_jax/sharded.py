"""The replica group of a sharded run in stages 1 and 2: each replica updates some of the weights alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from isotrain.plugin import Batch, Computation, Reduction, TrainingSpec
from isotrain_jax import mesh
from isotrain_jax.group import JaxReplicaGroup, slices
from isotrain_jax.mesh import EACH, EQUAL, ReplicaMesh
from isotrain_jax.program import Arrays, MicroBatch, State
from isotrain_jax.sharded_replica import Compiled, Exchanges, InOrder, ShardedReplica
from isotrain_jax.state import Names


class ShardedGroup(JaxReplicaGroup):
    """Group of one replica that has all weights, and slots of those that it updates."""

    _own: Sequence[int] = ()
    """Indices, among the trainable weights, of those that it updates."""
    _elsewhere: frozenset[str] = frozenset()
    """Names of slots that only other replicas have."""

    def __init__(self, spec: TrainingSpec, ties: ReplicaMesh) -> None:
        super().__init__(spec, ties)
        self._exchanges = Compiled(ties)
        self._never = ties.lift(self._numbers_of((np.False_,)))
        self._reducing: dict[Reduction, Callable[..., Any]] = {}
        self._update = ties.compile(self._updated, donated=[0])

    def shard_optimizer(self, weights: Sequence[Sequence[int]]) -> None:
        (self._own,) = weights
        before = self._names.of_optimizer()
        slots = self._program.shard_optimizer(self._own)
        self._names = Names(self._program, self._mesh.rank)
        self._elsewhere = frozenset(before - self._names.of_optimizer())
        self._state = self._state._replace(slots=self._mesh.lift(slots))

    def _seen(self, state: State, exchanges: Exchanges) -> ShardedReplica:
        return ShardedReplica(self._program, self._mesh, state, exchanges)

    def reduce_scatter_gradients(
        self, batch: Batch, reduction: Reduction
    ) -> tuple[list[list[jax.Array]], jax.Array]:
        """Computes and reduces gradients; shapes as in the contract. Uneven slices are compiled alone."""
        slots, self._state = self._state.slots, self._state._replace(slots=[])
        reduced = self._reduced if batch.even else self._reduced_after_passes
        kept, loss = reduced(slices(batch), self._weights(batch), reduction)
        self._state = self._state._replace(slots=slots)
        return [kept], loss

    def _reduced(
        self, pieces: Sequence[MicroBatch], weights: jax.Array, reduction: Reduction
    ) -> tuple[Arrays, jax.Array]:
        """Reduced gradients of a step in one compiled function, and the mean loss, a scalar."""
        if reduction not in self._reducing:

            def function(state: State, pieces: Any, weights: jax.Array, never: jax.Array) -> Any:
                return self._passes(state, pieces, weights, never, reduction)

            gives = (EACH, EACH, EQUAL)
            self._reducing[reduction] = self._mesh.compile(function, gives, donated=[0])
        given = self._mesh.lift((pieces, weights))
        found = self._reducing[reduction](self._state, *given, self._never)
        self._state, kept, loss = found
        return self._mesh.lower((kept, loss))

    def _passes(
        self,
        state: State,
        pieces: Sequence[MicroBatch],
        weights: jax.Array,
        never: jax.Array,
        reduction: Reduction,
    ) -> tuple[State, Arrays, jax.Array]:
        """A replica's passes: new state, reduced gradients, and the mean loss, a scalar."""
        replica = self._seen(state, InOrder(never))

        def take(gradients: Arrays) -> Arrays:
            return _kept(reduction, replica, gradients)

        each = take if reduction.each_slice else list
        loss, sums, state = self._program.contribution(state, pieces, weights, take=each)
        kept = sums if reduction.each_slice else take(sums)
        return state, kept, replica.all_reduce(loss.reshape(1), "mean").reshape(())

    def _reduced_after_passes(
        self, pieces: Sequence[MicroBatch], weights: jax.Array, reduction: Reduction
    ) -> tuple[Arrays, jax.Array]:
        """Reduced gradients of passes that are compiled alone, and the mean loss, a scalar."""
        together = 1 if reduction.each_slice else len(pieces)
        found = []
        for first in range(0, len(pieces), together):
            some = slice(first, first + together)
            loss, gradients, state = self._contributed(pieces[some], weights[some])
            self._state = self._after_pass(state)
            replica = self._seen(state, self._exchanges)
            found.append((_kept(reduction, replica, gradients), loss))
        kept, loss = jax.tree.map(lambda *each: sum(each[1:], each[0]), *found)
        return kept, self._exchanges.make(mesh.all_reduce, loss, "mean")

    def update_shard(
        self,
        gradients: Sequence[Sequence[jax.Array]],
        learning_rate: float,
        norms: Sequence[jax.Array] | None,
    ) -> None:
        norm = None if norms is None else norms[0].reshape(1)
        given = self._mesh.lift((list(gradients[0]), norm, self._rate(learning_rate)))
        weights = list(self._state.trainable)
        own = [weights[place] for place in self._own]
        updated, slots = self._update((own, self._state.slots), *given)
        for place, weight in zip(self._own, updated, strict=True):
            weights[place] = weight
        self._state = self._state._replace(trainable=weights, slots=slots)

    def _updated(
        self,
        before: tuple[Arrays, Arrays],
        gradients: Arrays,
        norm: jax.Array | None,
        rate: jax.Array,
    ) -> tuple[Arrays, Arrays]:
        """Local weights and slots after an update by gradients of their shapes."""
        return self._program.update_shard(self._own, *before, gradients, norm, rate)

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        """Runs a computation, not compiled as a whole, for replicas have different weights. Collective.

        It sees no slots, and waits for the step before: a replica without weights in a bucket would wait for
        nothing, and communicate before the others do.
        """
        options = {} if static is None else {"static": static}
        before = jax.block_until_ready(self._local_state()._replace(slots=[]))
        replica = self._seen(before, self._exchanges)
        result = computation(replica, *(own for (own,) in values), **options)
        for field in ("trainable", "others"):
            changed = getattr(replica.state, field)
            if changed is not getattr(before, field):
                self._state = self._state._replace(**{field: self._mesh.lift(changed)})
        return [result]

    def keep_gradients(self) -> bool:
        return False

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        here = {name: value for name, value in state.items() if not self.is_remote(name)}
        super().write_state(here, replica=replica)

    def is_remote(self, name: str) -> bool:
        return name in self._elsewhere


def _kept(reduction: Reduction, replica: ShardedReplica, gradients: Arrays) -> Arrays:
    """Results of a reduction of all gradients, bucket by bucket."""
    kept: Arrays = []
    for bucket, static in zip(reduction.buckets, reduction.statics, strict=True):
        kept += reduction.reduce(replica, [gradients[place] for place in bucket], static=static)
    return kept
