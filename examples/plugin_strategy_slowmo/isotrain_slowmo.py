"""Slow momentum: local steps; what they achieved together is taken for the gradient of a slower optimizer.

SlowMo: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", arXiv
1910.00643, algorithm 1. Block-wise model update filtering (BMUF, Chen and Huo, ICASSP 2016) is the same idea.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from isotrain.plugin import Capability, IsotrainError, Strategy, StrategyState, hookimpl

isotrain_api = "1.0"


class SlowMomentum(Strategy):
    """Every few local steps the weights are averaged, and moved on with momentum."""

    name = "slow-momentum"
    summary = "local steps; every few of them averaged, and moved on with a slow momentum"
    requires = frozenset({Capability.LOCAL_STEP, Capability.COMPUTE})

    def __init__(self, every: int = 8, momentum: float = 0.5, rate: float = 1.0) -> None:
        """Checks the options.

        Args:
            every: Local steps from one averaging to the next.
            momentum: Beta of the paper; with 0 and `rate` 1 nothing but averaging is left.
            rate: Alpha of the paper, the slow learning rate.

        Raises:
            IsotrainError: One is out of range.
        """
        if not (isinstance(every, int) and every >= 1 and 0 <= momentum < 1 and rate > 0):
            raise IsotrainError(
                "strategy 'slow-momentum': expected a whole number `every` of at least 1, `momentum`"
                f" from 0 to below 1 and `rate` above 0; received every={every!r},"
                f" momentum={momentum!r}, rate={rate!r}."
            )
        self._every = every
        self._momentum = momentum
        self._rate = rate
        self._steps = 0
        self._learning_rate = 0.0
        self._anchors: list[Any] = []
        self._velocities: list[Any] = []

    def started(self, group: Any) -> None:
        """Keeps the weights that all replicas start from: a vector for each local replica."""
        self._anchors = group.compute(_weights)
        self._velocities = group.compute(_standing_still)

    def state_written(self, group: Any) -> None:
        """Starts anew from the weights that were set."""
        self.started(group)
        self._steps, self._learning_rate = 0, 0.0

    def state(self, group: Any) -> StrategyState:
        """Anchor and velocity of the last slow step, and steps since; the same on all replicas."""
        return StrategyState(
            values={"steps": self._steps, "learning_rate": self._learning_rate},
            tensors={
                "anchor": group.numpy(self._anchors[0]),
                "velocity": group.numpy(self._velocities[0]),
            },
        )

    def load_state(self, group: Any, state: StrategyState) -> None:
        """Goes on with the momentum, also on another number of replicas."""
        for name, vectors in (("anchor", self._anchors), ("velocity", self._velocities)):
            given = [group.tensor(state.tensors[name]) for _ in group.local_replicas]
            vectors[:] = group.compute(_as_weights, given)
        self._steps = state.values["steps"]
        self._learning_rate = state.values["learning_rate"]

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Notes on state that a resumed run cannot use."""
        if strategy_before != self.name:
            return ["slow-momentum: starts without momentum"]
        if replicas_before != replicas:
            return ["slow-momentum: each replica's local weights: all continue from their mean"]
        return []

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        """Takes a local step, and a slow one after every `every` of them; returns the scalar mean loss."""
        loss = group.local_step(batch, learning_rate)
        self._steps += 1
        self._learning_rate = max(self._learning_rate, learning_rate)
        if self._steps == self._every:
            self._slow_step(group)
        return loss

    def _slow_step(self, group: Any) -> None:
        """Averages the weights and takes a slow momentum step from the mean. Collective."""
        if self._learning_rate == 0:
            return  # nothing has moved
        rates = [group.tensor(np.array(self._learning_rate)) for _ in group.local_replicas]
        given = (self._anchors, self._velocities, rates)
        moved = group.compute(_move, *given, static=(self._momentum, self._rate))
        self._anchors = [anchor for anchor, _ in moved]
        self._velocities = [velocity for _, velocity in moved]
        self._steps, self._learning_rate = 0, 0.0

    def finished(self, group: Any) -> None:
        """Brings the replicas together where the last steps left them apart."""
        if self._steps:
            self._slow_step(group)

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Per step: an optimal all-reduce of the weights every so many steps."""
        return 2 * (replicas - 1) / replicas * gradient_bytes / self._every


def _weights(replica: Any) -> Any:
    return replica.read(("trainable",))


def _as_weights(replica: Any, vector: Any) -> Any:
    """A vector in the type that the weights are read in."""
    return replica.ops.cast(vector, _weights(replica).dtype)


def _standing_still(replica: Any) -> Any:
    return replica.ops.zeros_like(_weights(replica))


def _move(
    replica: Any, anchor: Any, velocity: Any, learning_rate: Any, *, static: tuple[float, float]
) -> tuple[Any, Any]:
    """Equation 2 of the paper, on one replica; every backend runs it natively.

    Args:
        replica: Replica that runs this computation.
        anchor: Weights of all replicas after the last slow step, a vector.
        velocity: Velocity of the slow optimizer, a vector.
        learning_rate: Largest learning rate of the local steps, a scalar above 0.
        static: Momentum and rate of the slow optimizer.

    Returns:
        The new anchor and velocity.
    """
    momentum, rate = static
    learning_rate = replica.ops.cast(learning_rate, anchor.dtype)
    mean = replica.all_reduce(_weights(replica), "mean")
    velocity = momentum * velocity + (anchor - mean) / learning_rate
    anchor = anchor - rate * learning_rate * velocity
    replica.write(("trainable",), anchor)
    return anchor, velocity


@hookimpl
def isotrain_register_strategies(register: Any) -> None:
    """Registers the strategy."""
    register.add(SlowMomentum)
