"""Local SGD: replicas take local steps, and every k of them their weights are averaged.

Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767; a synchronous start (post-local
SGD): Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from isotrain.plugin import (
    AVERAGED,
    Batch,
    Capability,
    Plan,
    ReplicaGroup,
    StrategyState,
    Tensor,
    TrainingSpec,
)
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import (
    LocalStepStrategy,
    SliceWeightSums,
    average_parts,
)


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
        self._counts = SliceWeightSums()
        self._is_local = not self._start

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
        is_local = batch.step >= self._start
        if is_local and not self._is_local:
            self._begin_local_steps(group)
        elif self._is_local and not is_local:
            self._end_local_steps(group)
        self._is_local = is_local
        if not is_local:
            return group.synchronous_step(batch, learning_rate)
        loss = group.local_step(batch, learning_rate)
        self._local_step_taken(group, batch)
        return loss

    def _begin_local_steps(self, group: ReplicaGroup) -> None:
        """Prepares local steps after synchronous ones; the replicas' weights are equal."""

    def _end_local_steps(self, group: ReplicaGroup) -> None:
        """Makes replicas equal, with their momenta, for synchronous steps after a seek. Collective."""
        self.finished(group)
        group.compute(average_parts, static=("momenta",))

    def _local_step_taken(self, group: ReplicaGroup, batch: Batch) -> None:
        """Counts the samples of a local step, and averages where that is due. Collective."""
        self._counts.add(batch)
        if self.is_averaged_after(batch.step):
            self._average(group)

    def _average(self, group: ReplicaGroup) -> None:
        """Averages the option's parts, weighted by the samples since the last averaging. Collective."""
        group.compute(average_parts, *self._counts.means(group), static=self._parts)
        self._counts = SliceWeightSums()

    def sync_weights(self, group: ReplicaGroup) -> None:
        """Averages the weights, weighted by the samples since the last averaging. Collective."""
        group.compute(average_parts, *self._counts.means(group), static=AVERAGED)

    def state_written(self, group: ReplicaGroup) -> None:
        """Starts counting samples again: the replicas' weights are equal."""
        self._counts = SliceWeightSums()

    def state(self, group: ReplicaGroup) -> StrategyState:
        """Steps, and slice weights of each replica (a float64 scalar), since the last averaging. Local."""
        samples = {
            replica: {"samples": np.array(weight)}
            for replica, weight in zip(group.local_replicas, self._counts.sums, strict=False)
        }
        values = {"steps": self._counts.steps, "even": self._counts.even, "local": self._is_local}
        return StrategyState(values, per_replica=samples)

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:
        """Restores the counts; there are none right after an averaging."""
        samples, values = state.per_replica, state.values
        self._is_local = values["local"]
        self._counts = SliceWeightSums()
        if samples and values["steps"]:
            sums = [float(samples[replica]["samples"]) for replica in group.local_replicas]
            self._counts = SliceWeightSums(sums, values["steps"], values["even"])

    def finished(self, group: ReplicaGroup) -> None:
        """Gives all replicas equal weights, unless the last step did."""
        if self._counts.steps:
            self._average(group)

    def why_not_elastic(self) -> str | None:
        """None: the others go back to the last averaging (`is_savepoint`)."""
        return None

    def is_savepoint(self, step: int) -> bool:
        """Whether all replicas have the same weights after a step: a synchronous one, or an averaging."""
        return step < self._start or self.is_averaged_after(step)

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes of a ring all-reduce per averaging, as a mean over the run (or the last phase)."""
        all_reduce = 2 * (replicas - 1) / replicas * gradient_bytes
        averaging = self._averaging_bytes(gradient_bytes, replicas)
        if not self._total_steps:
            return averaging / self._phases[-1][1]
        synchronous = min(self._start, self._total_steps)
        local = range(synchronous, self._total_steps)
        averagings = sum(map(self._averaged_part, local))
        averagings += 1 - self._averaged_part(local[-1]) if local else 0
        return (synchronous * all_reduce + averagings * averaging) / self._total_steps

    def _averaged_part(self, step: int) -> float:
        """Part of the weights that are averaged after a step, from 0 to 1."""
        return float(self.is_averaged_after(step))

    def _averaging_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes that each replica sends in an averaging."""
        return 2 * (replicas - 1) / replicas * gradient_bytes * (1 + self._momenta_per_weight)


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
