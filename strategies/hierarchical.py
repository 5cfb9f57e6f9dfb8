"""Hierarchical data parallelism: a two-level all-reduce, inside each host and between hosts.

Gradients are summed on each host, then between one replica per host, and broadcast inside each host, so that
only one replica per host uses the slower links. Two-level collectives: Thakur et al., "Optimization of
Collective Communication Operations in MPICH", 2005; BytePS: Jiang et al., OSDI 2020.
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
    average_gradients,
    hosts_of_size,
)
from isotrain.strategies import option_checks


class Hierarchical(Strategy):
    """Every step applies the mean of all gradients, reduced in two levels."""

    name = "hierarchical"
    summary = "synchronous: gradients summed inside each host, between hosts, and shared inside"
    requires = frozenset(
        {Capability.GRADIENTS, Capability.APPLY_GRADIENTS, Capability.COMPUTE, Capability.SUBGROUPS}
    )
    keeps_replicas_equal = "always"
    equals_data_parallel = True
    invariants = frozenset({Invariant.GRADIENT_SUM})

    def __init__(self, host_size: int | None = None) -> None:
        """Checks `host_size`, the number of replicas to treat as one host; None for the hosts of the plan.

        Raises:
            PlanError: It is not a whole number of at least 1.
        """
        self._size = (
            None
            if host_size is None
            else option_checks.whole_number(self.name, "host_size", host_size, 1)
        )
        self._hosts: Hosts = ()

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses float16 and a `host_size` that does not divide the replicas.

        Raises:
            PlanError: The replicas do not divide into hosts of `host_size`.
            UnsupportedError: The precision is float16.
        """
        option_checks.refuse_float16(self.name, spec, "sums gradients without a loss scale")
        if self._size is not None and plan.replicas > 1:
            hosts_of_size(f"strategy {self.name}", plan.replicas, self._size)
        return []

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        """Keeps which replicas share a host; in an elastic run the last one may have fewer."""
        replicas, size = range(plan.replicas), self._size
        self._hosts = plan.hosts
        if size is not None and plan.replicas > 1:
            self._hosts = tuple(tuple(replicas[first : first + size]) for first in replicas[::size])

    def why_not_elastic(self) -> None:
        """None: it keeps nothing, and its levels are formed anew of the replicas that are there."""

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """All-reduces gradients in two levels and applies their mean; returns the mean loss, a scalar."""
        gradients, loss = group.gradients(batch)
        weights = group.replica_weights(batch)
        means = group.compute(mean_in_levels, gradients, *weights, static=self._hosts)
        group.apply_gradients(means, learning_rate)
        return loss

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float | None:
        """The mean over the replicas; the first of each host sends most."""
        if not self._hosts:
            return None
        inside = sum(_all_reduce_volume(len(host)) + len(host) - 1 for host in self._hosts)
        return (inside + _all_reduce_volume(len(self._hosts))) * gradient_bytes / replicas


def mean_in_levels(
    replica: Replica,
    gradients: list[Tensor],
    weight: Tensor | None = None,
    *,
    static: Hosts,
) -> list[Tensor]:
    """The mean of all gradients; averages and sets moving statistics along with them. Collective.

    Args:
        replica: The replica that runs this computation.
        gradients: Local gradients, of any shape.
        weight: Weight of this replica, a scalar, for its statistics; None for 1.
        static: Replicas of each host.
    """

    def mean(vector: Tensor) -> Tensor:
        total = replica.all_reduce_within(vector, static)
        total = replica.all_reduce_within(total, [[host[0] for host in static]])
        return replica.broadcast_within(total, static) / replica.replicas

    return average_gradients(replica, gradients, weight, mean=mean)


def _all_reduce_volume(replicas: int) -> float:
    """Amount that all replicas together send in a ring all-reduce, in multiples of the tensor's bytes."""
    return 2.0 * (replicas - 1)
