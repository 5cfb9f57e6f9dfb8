"""Local SGD: replicas train on their own, and every k steps their weights are averaged.

Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767; the post-local start is that of
Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isotrain.plugin import (
    Batch,
    Capability,
    Plan,
    Replica,
    ReplicaGroup,
    StatePart,
    StrategyState,
    Tensor,
    TrainingSpec,
)
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import WEIGHTS, LocalStepStrategy, average, shares


class LocalSGD(LocalStepStrategy):
    """Local steps; every so many of them the mean of all replicas' weights."""

    name = "local-sgd"
    summary = "local steps; every k of them the weights of all replicas are averaged"
    requires = frozenset({Capability.LOCAL_STEP, Capability.COMPUTE, Capability.SYNCHRONOUS_STEP})

    def __init__(self, every: Any = 8, start: int = 0, average_momenta: bool = False) -> None:
        """Checks the options.

        Args:
            every: Local steps from one averaging to the next: a number, or pairs `[step, number]` for
                a number that changes at these steps.
            start: Steps at the beginning that are synchronous.
            average_momenta: Whether the optimizer's momenta are averaged with the weights.
        """
        self._start = option_checks.whole(self.name, "start", start, 0)
        self._phases = _phases(every, self._start)
        momenta = option_checks.switch(self.name, "average_momenta", average_momenta)
        if all(number == 1 for _, number in self._phases):
            self.keeps_replicas_equal, self.equals_data_parallel = "always", True
        self._parts = (*WEIGHTS, "momenta") if momenta else WEIGHTS
        self._slots = 0
        self._weights: list[float] = []
        self._steps = 0
        self._even = True

    def configure(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Notes how many momenta the optimizer has."""
        notes = super().configure(spec, plan)
        if "momenta" in self._parts:
            self._slots = len(spec.optimizer.slots)
            if spec.optimizer.name == "custom":
                notes.append(
                    "local-sgd: the bytes of the custom optimizer's momenta are not counted"
                )
        return notes

    def is_averaged_after(self, step: int) -> bool:
        """Whether the weights are averaged after a step: a function of its number alone."""
        following = [first for first, _ in self._phases if first > step]
        if following and step + 1 == following[0]:
            return True
        first, every = max(phase for phase in self._phases if phase[0] <= step)
        return (step + 1 - first) % every == 0

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Takes a synchronous or a local step, and averages when it is time to."""
        if batch.step < self._start:
            return group.synchronous_step(batch, learning_rate)
        loss = group.local_step(batch, learning_rate)
        self._count(batch)
        if self.is_averaged_after(batch.step):
            self._average(group, self._parts)
            self._forget()
        return loss

    def _count(self, batch: Batch) -> None:
        """Counts the samples on which each local replica's weights were trained."""
        own = shares(batch)
        self._weights = [a + b for a, b in zip(self._weights or [0.0] * len(own), own, strict=True)]
        self._steps += 1
        self._even = self._even and batch.even

    def _average(self, group: ReplicaGroup, parts: Sequence[StatePart]) -> None:
        """Averages, by the numbers of samples; where these are equal, without a product."""
        if self._even:
            group.compute(_mean, static=parts)
        else:
            weights = [group.tensor(np.array(sum_ / self._steps)) for sum_ in self._weights]
            group.compute(_mean, weights, static=parts)

    def _forget(self) -> None:
        """Counts from here on: the replicas agree."""
        self._weights, self._steps, self._even = [], 0, True

    def sync_weights(self, group: ReplicaGroup) -> None:
        """Gives every replica the mean, by the samples since they last agreed."""
        self._average(group, WEIGHTS)

    def state_written(self, group: ReplicaGroup) -> None:
        """The replicas agree again."""
        self._forget()

    def state(self, group: ReplicaGroup) -> StrategyState:
        """How many steps and samples each replica has trained on since they agreed."""
        samples = {
            replica: {"samples": np.array(own)}
            for replica, own in zip(group.local_replicas, self._weights, strict=False)
        }
        return StrategyState({"steps": self._steps, "even": self._even}, per_replica=samples)

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:
        """Goes on counting; replicas that have just agreed have counted nothing."""
        own = state.per_replica
        self._forget()
        if own:
            self._steps, self._even = state.values["steps"], state.values["even"]
            self._weights = [float(own[replica]["samples"]) for replica in group.local_replicas]

    def finished(self, group: ReplicaGroup) -> None:
        """Leaves every replica with the same weights."""
        if self._steps:  # else they have them already
            super().finished(group)
        self._forget()

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """An optimal all-reduce for each exchange, on average over the run (or the last phase)."""
        reduced = 2 * (replicas - 1) / replicas * gradient_bytes
        averaged = reduced * (1 + self._slots)
        if not self._total_steps:
            return averaged / self._phases[-1][1]
        synchronous = min(self._start, self._total_steps)
        local = range(synchronous, self._total_steps)
        averagings = sum(map(self.is_averaged_after, local)) + bool(
            local and not self.is_averaged_after(local[-1])
        )
        return (synchronous * reduced + averagings * averaged) / self._total_steps


def _mean(replica: Replica, weight: Tensor | None = None, *, static: Any) -> None:
    average(replica, static, weight)


def _phases(every: Any, start: int) -> list[tuple[int, int]]:
    """From the option `every` to pairs (first step, local steps), the first at `start`."""
    if not isinstance(every, list | tuple):
        return [(start, option_checks.whole("local-sgd", "every", every, 1))]
    pairs = [pair for pair in every if isinstance(pair, list | tuple) and len(pair) == 2]
    if not pairs or len(pairs) < len(every):
        raise option_checks.refused("local-sgd", "every", "a number or pairs [step, number]", every)
    phases = [
        (
            option_checks.whole("local-sgd", "every", step, 0),
            option_checks.whole("local-sgd", "every", number, 1),
        )
        for step, number in pairs
    ]
    steps = [step for step, _ in phases]
    if steps != sorted(set(steps)) or steps[0] > start:
        expected = f"pairs of ascending steps, the first at {start} or before"
        raise option_checks.refused("local-sgd", "every", expected, every)
    begun = [(start, number) for step, number in phases if step <= start][-1:]
    return begun + [phase for phase in phases if phase[0] > start]
