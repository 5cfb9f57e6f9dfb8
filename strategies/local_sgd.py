"""Local SGD: replicas take local steps, and every k of them their weights are averaged.

Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767; a synchronous start (post-local
SGD): Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isotrain.plugin import (
    AVERAGED,
    Batch,
    Capability,
    Plan,
    Replica,
    ReplicaGroup,
    StatePart,
    StrategyState,
    Tensor,
    TrainingSpec,
    average_state,
    slice_weights,
)
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import LocalStepStrategy


class LocalSGD(LocalStepStrategy):
    """Local steps; after every `every` of them, the weights are averaged over all replicas."""

    name = "local-sgd"
    summary = "local steps; every k of them the weights of all replicas are averaged"
    requires = frozenset({Capability.LOCAL_STEP, Capability.COMPUTE, Capability.SYNCHRONOUS_STEP})

    def __init__(self, every: Any = 8, start: int = 0, average_momenta: bool = False) -> None:
        """Checks the options.

        Args:
            every: Local steps between averagings: a number, or pairs `[step, number]` for a number that
                changes at these steps.
            start: Number of synchronous steps at the start.
            average_momenta: Whether the optimizer's momenta are averaged with the weights.

        Raises:
            PlanError: An option has a bad value.
        """
        self._start = option_checks.whole_number(self.name, "start", start, 0)
        self._phases = _parse_phases(self.name, every, self._start)
        self.period = self._phases[-1][1]
        momenta = option_checks.boolean(self.name, "average_momenta", average_momenta)
        if all(number == 1 for _, number in self._phases):
            self.keeps_replicas_equal, self.equals_data_parallel = "always", True
        self._parts = (*AVERAGED, "momenta") if momenta else AVERAGED
        self._momenta_per_weight = 0
        self._weights: list[float] = []  # sums over the steps since the last averaging
        self._steps = 0
        self._even = True

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Notes that the momenta of a custom optimizer are not counted."""
        notes = super().validate(spec, plan)
        if "momenta" in self._parts and spec.optimizer.name == "custom":
            notes.append("local-sgd: the bytes of the custom optimizer's momenta are not counted")
        return notes

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        """Keeps the number of momenta per weight, for `exchanged_bytes`."""
        super().configure(spec, plan)
        if "momenta" in self._parts:
            self._momenta_per_weight = len(spec.optimizer.slots)

    def is_averaged_after(self, step: int) -> bool:
        """Whether the weights are averaged after a step; depends on the step alone, so equal on all ranks."""
        later_phases = [first for first, _ in self._phases if first > step]
        if later_phases and step + 1 == later_phases[0]:
            return True
        first, every = max(phase for phase in self._phases if phase[0] <= step)
        return (step + 1 - first) % every == 0

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Takes a synchronous or a local step, and averages the weights if `is_averaged_after` it.

        Returns the mean loss, a scalar.
        """
        if batch.step < self._start:
            return group.synchronous_step(batch, learning_rate)
        loss = group.local_step(batch, learning_rate)
        self._count_samples(batch)
        if self.is_averaged_after(batch.step):
            self._synchronise(group)
            self._reset_counts()
        return loss

    def _synchronise(self, group: ReplicaGroup) -> None:
        """Gives all replicas equal weights after local steps: here their mean. Collective."""
        self._average(group, self._parts)

    def _count_samples(self, batch: Batch) -> None:
        """Adds the batch's slice weights to those since the last averaging."""
        weights = slice_weights(batch)
        sums = self._weights or [0.0] * len(weights)
        self._weights = [a + b for a, b in zip(sums, weights, strict=True)]
        self._steps += 1
        self._even = self._even and batch.even

    def _average(self, group: ReplicaGroup, parts: Sequence[StatePart]) -> None:
        """Averages, weighted by samples; without a multiplication where these are equal. Collective."""
        group.compute(_mean, *self._replica_weights(group), static=parts)

    def _replica_weights(self, group: ReplicaGroup) -> list[list[Tensor]]:
        """The local replicas' weights in means, one value of `compute`; none where all are equal."""
        if self._even:
            return []
        return [[group.tensor(np.array(sum_ / self._steps)) for sum_ in self._weights]]

    def _reset_counts(self) -> None:
        """Starts counting samples again: the replicas' weights are equal."""
        self._weights, self._steps, self._even = [], 0, True

    def sync_weights(self, group: ReplicaGroup) -> None:
        """Averages the weights, weighted by the samples since the last averaging. Collective."""
        self._average(group, AVERAGED)

    def state_written(self, group: ReplicaGroup) -> None:
        """Starts counting samples again: the replicas' weights are equal."""
        self._reset_counts()

    def state(self, group: ReplicaGroup) -> StrategyState:
        """Steps, and slice weights of each replica (a float64 scalar), since the last averaging."""
        samples = {
            replica: {"samples": np.array(weight)}
            for replica, weight in zip(group.local_replicas, self._weights, strict=False)
        }
        return StrategyState({"steps": self._steps, "even": self._even}, per_replica=samples)

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:
        """Restores the counts; there are none right after an averaging."""
        samples = state.per_replica
        self._reset_counts()
        if samples and state.values["steps"]:
            self._steps, self._even = state.values["steps"], state.values["even"]
            self._weights = [float(samples[replica]["samples"]) for replica in group.local_replicas]

    def finished(self, group: ReplicaGroup) -> None:
        """Gives all replicas equal weights, unless the last step did."""
        if self._steps:
            self._synchronise(group)
        self._reset_counts()

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes of a ring all-reduce per averaging, as a mean over the run (or the last phase)."""
        all_reduce = 2 * (replicas - 1) / replicas * gradient_bytes
        averaging = self._averaging_bytes(gradient_bytes, replicas)
        if not self._total_steps:
            return averaging / self._phases[-1][1]
        synchronous = min(self._start, self._total_steps)
        local = range(synchronous, self._total_steps)
        averagings = sum(map(self.is_averaged_after, local)) + bool(
            local and not self.is_averaged_after(local[-1])
        )
        return (synchronous * all_reduce + averagings * averaging) / self._total_steps

    def _averaging_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes that each replica sends in an averaging."""
        return 2 * (replicas - 1) / replicas * gradient_bytes * (1 + self._momenta_per_weight)


def _mean(replica: Replica, weight: Tensor | None = None, *, static: Any) -> None:
    """Computation that averages the parts `static` over all replicas; `weight` is a scalar or None."""
    average_state(replica, static, weight)


def _parse_phases(strategy: str, every: Any, start: int) -> list[tuple[int, int]]:
    """Parses the option `every` to pairs (first step, local steps), the first pair at `start`.

    Raises:
        PlanError: It is neither a number nor pairs in ascending order.
    """
    if not isinstance(every, list | tuple):
        return [(start, option_checks.whole_number(strategy, "every", every, 1))]
    pairs = [pair for pair in every if isinstance(pair, list | tuple) and len(pair) == 2]
    if not pairs or len(pairs) < len(every):
        raise option_checks.option_error(
            strategy, "every", "a number or pairs [step, number]", every
        )
    phases = [
        (
            option_checks.whole_number(strategy, "every", step, 0),
            option_checks.whole_number(strategy, "every", number, 1),
        )
        for step, number in pairs
    ]
    steps = [step for step, _ in phases]
    if steps != sorted(set(steps)) or steps[0] > start:
        expected = f"pairs of ascending steps, the first at {start} or before"
        raise option_checks.option_error(strategy, "every", expected, every)
    at_start = [(start, number) for step, number in phases if step <= start][-1:]
    return at_start + [phase for phase in phases if phase[0] > start]
