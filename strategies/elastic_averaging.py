"""Elastic averaging: replicas explore, tied to a common centre as if by springs.

Synchronous EASGD (and, with a momentum, EAMSGD): Zhang, Choromanska and LeCun, "Deep learning with Elastic
Averaging SGD", arXiv 1412.6651, equations 5 and 6.
"""

from __future__ import annotations

from isotrain.plugin import Batch, Capability, Replica, ReplicaGroup, StrategyState, Tensor
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import LocalStepStrategy, average_statistics


class ElasticAveraging(LocalStepStrategy):
    """Local steps; every so many of them replicas and centre move towards each other."""

    name = "elastic-averaging"
    summary = "local steps; replicas are drawn to a common centre, and the centre to their mean"
    requires = frozenset({Capability.LOCAL_STEP, Capability.COMPUTE})

    def __init__(self, every: int = 4, beta: float = 0.9) -> None:
        """Checks the options.

        Args:
            every: Steps from one elastic exchange to the next: tau in the paper.
            beta: How far the centre moves towards the mean of the replicas; each of n replicas moves
                beta / n of its way towards the centre.
        """
        self._every = option_checks.whole(self.name, "every", every, 1)
        self._beta = option_checks.fraction(self.name, "beta", beta)
        self._centre: list[Tensor] = []

    def started(self, group: ReplicaGroup) -> None:
        """Puts the centre where all replicas start."""
        self._centre = group.compute(read_trainable)

    def state_written(self, group: ReplicaGroup) -> None:
        """Puts the centre where all replicas go on from."""
        self.started(group)

    def state(self, group: ReplicaGroup) -> StrategyState:
        """The centre."""
        return StrategyState(tensors={"centre": group.numpy(self._centre[0])})

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:
        """Puts the centre back, which is one for any number of replicas."""
        given = [group.tensor(state.tensors["centre"]) for _ in group.local_replicas]
        self._centre = group.compute(as_trainable, given)

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Says what becomes of the replicas and of their centre."""
        if strategy_before != self.name:
            return [f"{self.name}: the centre starts anew, where the weights are"]
        return super().resume_notes(strategy_before, replicas_before, replicas)

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Takes a local step; in an exchange, the pull is that of before the step."""
        if batch.step % self._every or batch.step == 0 or group.replicas == 1:
            return group.local_step(batch, learning_rate)
        pulls = self._exchange(group)
        loss = group.local_step(batch, learning_rate)
        group.compute(move_back, pulls)
        return loss

    def _exchange(self, group: ReplicaGroup) -> list[Tensor]:
        """Moves the centre towards the replicas; returns how each is pulled towards it."""
        found = group.compute(exchange, self._centre, static=self._beta)
        self._centre = [centre for centre, _ in found]
        return [pull for _, pull in found]

    def sync_weights(self, group: ReplicaGroup) -> None:
        """Gives every replica the centre, with the mean of the moving statistics."""
        if group.replicas > 1:
            group.compute(take_centre, self._centre)

    def finished(self, group: ReplicaGroup) -> None:
        """Moves the centre once more, towards where the last steps have led, and leaves it to all."""
        self._exchange(group)
        self.sync_weights(group)

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """An optimal all-reduce of the weights in each exchange, the last one at the end."""
        exchanges = self.exchanges_per_step(
            1 / self._every, lambda steps: (steps - 1) // self._every
        )
        return 2 * (replicas - 1) / replicas * gradient_bytes * exchanges


def read_trainable(replica: Replica) -> Tensor:
    """A copy of the trainable weights."""
    return replica.read(("trainable",))


def as_trainable(replica: Replica, centre: Tensor) -> Tensor:
    """A vector in the type that the trainable weights are read in."""
    return replica.ops.cast(centre, replica.read(("trainable",)).dtype)


def exchange(replica: Replica, centre: Tensor, *, static: float) -> tuple[Tensor, Tensor]:
    """Moves the centre by beta = `static` of the way to the mean; gives it, and the replica's pull."""
    distance = replica.read(("trainable",)) - centre
    mean = replica.all_reduce(distance, "mean")
    return centre + static * mean, distance * (static / replica.replicas)


def move_back(replica: Replica, pull: Tensor) -> None:
    """Subtracts the pull from the weights."""
    replica.write(("trainable",), replica.read(("trainable",)) - pull)


def take_centre(replica: Replica, centre: Tensor) -> None:
    """Sets the weights to the centre, and the moving statistics to their mean."""
    replica.write(("trainable",), centre)
    average_statistics(replica, None)
