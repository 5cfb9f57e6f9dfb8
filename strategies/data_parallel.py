"""Synchronous data parallelism: every step averages the gradients of all replicas."""

from __future__ import annotations

from isotrain.plugin import Batch, Capability, Invariant, ReplicaGroup, Strategy, Tensor


class DataParallel(Strategy):
    """Every step is the backend's native synchronous step (DDP, MirroredStrategy, Horovod, ...)."""

    name = "data-parallel"
    summary = "synchronous: gradients averaged over all replicas at every step, natively"
    requires = frozenset({Capability.SYNCHRONOUS_STEP})
    keeps_replicas_equal = "always"
    equals_data_parallel = True
    steps_named_updates = True
    invariants = frozenset({Invariant.GRADIENT_SUM})

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Runs one synchronous step on the global batch; returns the mean loss, a scalar."""
        return group.synchronous_step(batch, learning_rate)
