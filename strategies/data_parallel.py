"""Synchronous data parallelism: every step, the gradients of all replicas are averaged."""

from __future__ import annotations

from isotrain.plugin import Batch, Capability, Conserved, ReplicaGroup, Strategy, Tensor


class DataParallel(Strategy):
    """Asks the backend for its native synchronised step."""

    name = "data-parallel"
    summary = "synchronous: gradients averaged over all replicas at every step, natively"
    requires = frozenset({Capability.SYNCHRONISED_STEP})
    keeps_replicas_equal = "always"
    equals_data_parallel = True
    conserves = frozenset({Conserved.GRADIENT_SUM})

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Runs one synchronised step on the global batch."""
        return group.synchronised_step(batch, learning_rate)
