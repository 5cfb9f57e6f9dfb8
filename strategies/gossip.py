"""Gossip (decentralised SGD): each replica averages its weights with those of its neighbours in a graph.

D-PSGD: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv 1705.09056; here
the local update comes first, and mixing after it. The exponential graphs are those of Assran et al., arXiv
1811.10792.
"""

from __future__ import annotations

from isotrain.plugin import (
    AVERAGED,
    Batch,
    Capability,
    Invariant,
    Plan,
    Replica,
    ReplicaGroup,
    Tensor,
    TrainingSpec,
)
from isotrain.strategies import option_checks, topologies
from isotrain.strategies.averaging import LocalStepStrategy, average_weights


class Gossip(LocalStepStrategy):
    """Local steps; after every `every` of them, a mixing step with the neighbours."""

    name = "gossip"
    summary = "local steps; weights averaged with the neighbours in a ring, torus or other graph"
    requires = frozenset({Capability.LOCAL_STEP, Capability.COMPUTE, Capability.SEND_RECEIVE})
    invariants = frozenset({Invariant.PARAMETER_MEAN})

    def __init__(self, graph: str = "ring", every: int = 1, degree: int | None = None) -> None:
        """Checks the options.

        Args:
            graph: `ring`, `torus`, `exponential`, `one-peer-exponential`, `random` or `complete`.
            every: Local steps between mixing steps.
            degree: random: number of neighbours of each replica, even (2).

        Raises:
            PlanError: An option has a bad value.
        """
        self._graph = option_checks.one_of(self.name, "graph", graph, topologies.GRAPHS)
        self._every = option_checks.whole_number(self.name, "every", every, 1)
        if degree is not None and graph != "random":
            raise option_checks.option_error(
                self.name, "degree", "none except for graph random", degree
            )
        self._degree = option_checks.whole_number(
            self.name, "degree", 2 if degree is None else degree, 2
        )
        self._mixings: tuple[topologies.Rounds, ...] = ((),)

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses a number of replicas that the graph cannot have."""
        self._mixings_of(spec, plan)
        return super().validate(spec, plan)

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        """Builds the graph for the plan's number of replicas."""
        super().configure(spec, plan)
        self._mixings = self._mixings_of(spec, plan)
        self.period = self._every * len(self._mixings)

    def _mixings_of(self, spec: TrainingSpec, plan: Plan) -> tuple[topologies.Rounds, ...]:
        if plan.replicas == 1:
            return ((),)
        return topologies.mixings(self._graph, plan.replicas, self._degree, spec.seed)

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Takes a local step, and mixes weights after every `every` steps; returns the scalar mean loss."""
        loss = group.local_step(batch, learning_rate)
        count, rest = divmod(batch.step + 1, self._every)
        if rest == 0 and group.replicas > 1:
            if self._graph == "complete":
                group.compute(average_weights)
            else:
                group.compute(mix, static=self._mixings[(count - 1) % len(self._mixings)])
        return loss

    def why_not_elastic(self) -> str:
        """Reason why the others cannot go on: mixing does not give all replicas the same weights."""
        return (
            "each replica has weights of its own, of which its neighbours have a part, and those of a lost"
            " replica are lost with it"
        )

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes of the weights to each neighbour (complete graph: an all-reduce), and a final all-reduce."""
        all_reduce = 2 * (replicas - 1) / replicas * gradient_bytes
        rounds = sum(map(len, self._mixings)) / len(self._mixings)
        mixing = all_reduce if self._graph == "complete" else rounds * gradient_bytes
        end = self.exchanges_per_step(0.0, lambda steps: 0)
        return mixing / self._every + end * all_reduce


def mix(replica: Replica, *, static: topologies.Rounds) -> None:
    """Replaces weights by the mean of the local ones and those received in each round. Collective."""
    weights = replica.read(AVERAGED)
    total = weights
    for permutation in static:
        total = total + replica.send_receive(weights, permutation)
    replica.write(AVERAGED, total / (len(static) + 1))
