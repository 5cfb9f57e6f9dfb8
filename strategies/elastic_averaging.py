"""Elastic averaging: local steps, with an elastic force between each replica and a common centre.

Synchronous EASGD (and, with a momentum, EAMSGD): Zhang, Choromanska and LeCun, "Deep learning with Elastic
Averaging SGD", arXiv 1412.6651, equations 5 and 6.
"""

from __future__ import annotations

from isotrain.plugin import Batch, Capability, Replica, ReplicaGroup, StrategyState, Tensor
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import (
    LocalStepStrategy,
    as_trainable,
    average_statistics,
    read_trainable,
)


class ElasticAveraging(LocalStepStrategy):
    """Local steps; every `every` of them, replicas and centre move towards each other."""

    name = "elastic-averaging"
    summary = "local steps; replicas are drawn to a common centre, and the centre to their mean"
    requires = frozenset({Capability.LOCAL_STEP, Capability.COMPUTE})

    def __init__(self, every: int = 4, beta: float = 0.9) -> None:
        """Checks the options.

        Args:
            every: Steps between elastic updates: tau in the paper.
            beta: Fraction of the distance to the replicas' mean that the centre moves; each of n replicas
                moves beta / n of its distance to the centre.

        Raises:
            PlanError: An option has a bad value.
        """
        self._every = self.period = option_checks.whole_number(self.name, "every", every, 1)
        self._beta = option_checks.fraction(self.name, "beta", beta)
        self._centre: list[Tensor] = []

    def started(self, group: ReplicaGroup) -> None:
        """Sets the centre to the initial weights."""
        self._centre = group.compute(read_trainable)

    def state_written(self, group: ReplicaGroup) -> None:
        """Sets the centre to the weights that were written."""
        self.started(group)

    def state(self, group: ReplicaGroup) -> StrategyState:
        """The centre, one vector of the trainable weights."""
        return StrategyState(tensors={"centre": group.numpy(self._centre[0])})

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:
        """Restores the centre, which does not depend on the number of replicas."""
        centres = [group.tensor(state.tensors["centre"]) for _ in group.local_replicas]
        self._centre = group.compute(as_trainable, centres)

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Notes that the centre is lost."""
        if strategy_before != self.name:
            return [f"{self.name}: the centre starts again, from the current weights"]
        return []

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Takes a local step and, every `every` steps, an elastic update; returns the scalar mean loss.

        The elastic update uses the distances from before the local step.
        """
        if batch.step % self._every or batch.step == 0 or group.replicas == 1:
            return group.local_step(batch, learning_rate)
        pulls = self._move_centre(group)
        loss = group.local_step(batch, learning_rate)
        group.compute(subtract_pull, pulls)
        return loss

    def _move_centre(self, group: ReplicaGroup) -> list[Tensor]:
        """Moves the centre; returns the pull of each local replica, a vector of weights. Collective."""
        results = group.compute(move_centre, self._centre, static=self._beta)
        self._centre = [centre for centre, _ in results]
        return [pull for _, pull in results]

    def sync_weights(self, group: ReplicaGroup) -> None:
        """Sets the weights of all replicas to the centre, and averages moving statistics. Collective."""
        if group.replicas > 1:
            group.compute(set_to_centre, self._centre)

    def finished(self, group: ReplicaGroup) -> None:
        """Moves the centre once more, for the last steps, and gives it to all replicas."""
        self._move_centre(group)
        self.sync_weights(group)

    def why_not_elastic(self) -> str:
        """Reason why the others cannot go on: the centre has no replica's weights."""
        return (
            "each replica has weights of its own, towards which the centre only moves, and those of a lost"
            " replica are lost with it"
        )

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes of a ring all-reduce of the weights in each elastic update, and in one at the end."""
        exchanges = self.exchanges_per_step(
            1 / self._every, lambda steps: (steps - 1) // self._every
        )
        return 2 * (replicas - 1) / replicas * gradient_bytes * exchanges


def move_centre(replica: Replica, centre: Tensor, *, static: float) -> tuple[Tensor, Tensor]:
    """Moves the centre by beta (mean of x_i - centre); replica i's pull is beta/n (x_i - centre). Collective.

    Args:
        replica: The replica that runs this computation.
        centre: The centre, one vector of the trainable weights.
        static: The option `beta`.

    Returns:
        The new centre, and the replica's pull: a vector to subtract from its weights.
    """
    distance = replica.read(("trainable",)) - centre
    mean = replica.all_reduce(distance, "mean")
    return centre + static * mean, distance * (static / replica.replicas)


def subtract_pull(replica: Replica, pull: Tensor) -> None:
    """Subtracts the pull, a vector, from the trainable weights. Local."""
    replica.write(("trainable",), replica.read(("trainable",)) - pull)


def set_to_centre(replica: Replica, centre: Tensor) -> None:
    """Sets the trainable weights to the centre, a vector, and averages moving statistics. Collective."""
    replica.write(("trainable",), centre)
    average_statistics(replica)
