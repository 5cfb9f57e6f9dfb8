"""Hierarchical data parallelism: gradients are summed on each host, then between hosts, then shared.

The two levels of the all-reduce are those of high-performance computing (Thakur et al., "Optimization of
Collective Communication Operations in MPICH", 2005) and of BytePS (Jiang et al., OSDI 2020): one replica of
each host alone uses the slower links between hosts.
"""

from __future__ import annotations

from isotrain.plugin import (
    Batch,
    Capability,
    Hosts,
    Invariant,
    Plan,
    Replica,
    ReplicaGroup,
    Strategy,
    Tensor,
    TrainingSpec,
    hosts_of_size,
)
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import weights_of_replicas
from isotrain.strategies.flatten import joined, separated


class Hierarchical(Strategy):
    """Every step, the mean of all gradients, by way of one replica of each host."""

    name = "hierarchical"
    summary = "synchronous: gradients summed inside each host, between hosts, and shared inside"
    requires = frozenset(
        {Capability.GRADIENTS, Capability.APPLY_GRADIENTS, Capability.COMPUTE, Capability.SUBGROUPS}
    )
    keeps_replicas_equal = "always"
    equals_data_parallel = True
    invariants = frozenset({Invariant.GRADIENT_SUM})

    def __init__(self, host_size: int | None = None) -> None:
        """Checks the options.

        Args:
            host_size: Replicas that count as one host; None for the hosts of the plan.
        """
        self._size = (
            None if host_size is None else option_checks.whole(self.name, "host_size", host_size, 1)
        )
        self._hosts: Hosts = ()

    def configure(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Notes which replicas share a host."""
        option_checks.without_loss_scaling(self.name, spec, "sums gradients without a loss scale")
        self._hosts = plan.hosts
        if self._size is not None and plan.replicas > 1:
            self._hosts = hosts_of_size(f"strategy {self.name}", plan.replicas, self._size)
        return []

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Computes gradients, sums them in two levels, and applies their mean."""
        gradients, loss = group.gradients(batch)
        weights = weights_of_replicas(group, batch)
        means = group.compute(mean_in_levels, gradients, *weights, static=self._hosts)
        group.apply_gradients(means, learning_rate)
        return loss

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float | None:
        """The mean over the replicas, whose first of each host sends most."""
        if not self._hosts:
            return None
        inside = sum(_all_reduced(len(host)) + len(host) - 1 for host in self._hosts)
        return (inside + _all_reduced(len(self._hosts))) * gradient_bytes / replicas


def mean_in_levels(
    replica: Replica,
    gradients: list[Tensor],
    weight: Tensor | None = None,
    *,
    static: Hosts,
) -> list[Tensor]:
    """The mean of all gradients; moving statistics are averaged along with them, and set."""
    ops = replica.ops
    statistics = replica.read(("statistics",))
    if weight is not None:
        statistics = statistics * ops.cast(weight, statistics.dtype)
    tensors = [*gradients, statistics] if statistics.shape[0] else gradients
    total = replica.all_reduce_within(joined(ops, tensors), static)
    total = replica.all_reduce_within(total, [[host[0] for host in static]])
    total = replica.broadcast_within(total, static)
    means = separated(ops, total / replica.replicas, tensors)
    if statistics.shape[0]:
        replica.write(("statistics",), means.pop())
    return means


def _all_reduced(members: int) -> float:
    """What all members together send in an optimal all-reduce, in sizes of the tensor."""
    return 2.0 * (members - 1)
