"""Replica of the reference backend, as a strategy's computations get it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from isotrain.plugin import Replica, StatePart, Subgroups, local_subgroup
from isotrain.testing.reference.comm import Communicator
from isotrain.testing.reference.flatten import flatten, unflatten_into
from isotrain.testing.reference.layers import Array
from isotrain.testing.reference.tensor_ops import NumpyTensorOps
from isotrain.testing.reference.trainer import ReplicaTrainer


class ReferenceReplica(Replica):
    """Replica that reads and writes a trainer's arrays; collectives run at once.

    Vectors are 1-D: the parts or weights one after the other, in the widest of their dtypes.
    """

    ops = NumpyTensorOps()

    def __init__(self, program: ReplicaTrainer, exchange: Communicator) -> None:
        self.index = exchange.replica
        self.replicas = exchange.replicas
        self._program = program
        self._exchange = exchange

    def read(self, parts: Sequence[StatePart]) -> Array:
        return flatten(self._arrays(parts))

    def write(self, parts: Sequence[StatePart], vector: Array) -> None:
        unflatten_into(vector, self._arrays(parts))

    def read_weights(self, indices: Sequence[int]) -> Array:
        dtypes = [weight.dtype for weight in self._program.part("trainable")]
        return flatten(self._weights(indices)).astype(np.result_type(*dtypes))

    def write_weights(self, indices: Sequence[int], vector: Array) -> None:
        unflatten_into(vector, self._weights(indices))

    def _weights(self, places: Sequence[int]) -> list[Array]:
        """Trainable weights at some indices, in their shapes."""
        weights = self._program.part("trainable")
        return [weights[index] for index in places]

    def _arrays(self, parts: Sequence[StatePart]) -> list[Array]:
        """Arrays of parts of the state, in their shapes."""
        return [array for part in parts for array in self._program.part(part)]

    def all_gather(self, tensor: Array) -> Array:
        return self._exchange.all_gather(tensor)

    def all_reduce_within(self, tensor: Array, subgroups: Subgroups) -> Array:
        """Sums as by default; shapes may differ between subgroups. Collective."""
        subgroup = local_subgroup(self.index, subgroups) or (self.index,)
        return np.array(functools.reduce(np.add, self._exchange.gather(tensor, subgroup)))
