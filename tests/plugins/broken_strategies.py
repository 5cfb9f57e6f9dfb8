"""Strategies with one fault each, to see that the conformance checks find it.

Registered by the hook that any plugin uses, where this module is chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from isotrain import Capability, Invariant, Strategy
from isotrain.core.plugins.hookspecs import hookimpl
from isotrain.core.plugins.registries import StrategyRegistry
from isotrain.plugin import ModelBytes, Replica, StateBytes
from isotrain.strategies.sharded import Sharded

LOCAL = frozenset({Capability.LOCAL_STEP, Capability.AVERAGE_PARAMETERS})
REDUCING = frozenset({Capability.GRADIENTS, Capability.APPLY_GRADIENTS, Capability.COMPUTE})


class _Local(Strategy):
    """Local steps, averaged after each."""

    summary = "broken"
    requires = LOCAL
    keeps_replicas_equal = "always"

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        loss = group.local_step(batch, learning_rate)
        group.average_parameters()
        return loss


class _Reducing(Strategy):
    """Gradients, changed by `reduced`, and applied."""

    summary = "broken"
    requires = REDUCING
    keeps_replicas_equal = "always"

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        gradients, loss = group.gradients(batch)
        reduced = [self.reduced(group, list(parts)) for parts in zip(*gradients, strict=True)]
        group.apply_gradients(list(zip(*reduced, strict=True)), learning_rate)
        return loss

    def reduced(self, group: Any, parts: list[Any]) -> list[Any]:
        return list(group.all_reduce(parts, "mean"))


class Undeclared(_Reducing):
    """Uses a collective that it does not declare."""

    name = "broken-undeclared"
    requires = frozenset({Capability.GRADIENTS, Capability.APPLY_GRADIENTS})


class WrongLoss(_Local):
    """Gives twice the loss."""

    name = "broken-wrong-loss"

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        return super().step(group, batch, learning_rate) * 2


class NeverAverages(_Local):
    """Says that replicas are equal in the end, and averages nothing."""

    name = "broken-never-averages"
    keeps_replicas_equal = "finally"

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        return group.local_step(batch, learning_rate)


class SometimesEqual(_Local):
    """Says that replicas are always equal, and averages at every second step."""

    name = "broken-sometimes-equal"

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        loss = group.local_step(batch, learning_rate)
        if batch.step % 2:
            group.average_parameters()
        return loss

    def finished(self, group: Any) -> None:
        group.average_parameters()


def _take_over(replica: Replica) -> None:
    weights = replica.read(("trainable",))
    replica.write(("trainable",), replica.all_gather(weights)[0])


class RootTakesAll(_Local):
    """Says that it conserves the mean of the parameters, and gives everybody those of replica 0."""

    name = "broken-root-takes-all"
    requires = frozenset({Capability.LOCAL_STEP, Capability.COMPUTE})
    invariants = frozenset({Invariant.PARAMETER_MEAN})

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        loss = group.local_step(batch, learning_rate)
        group.compute(_take_over)
        return loss


class SumsGradients(_Reducing):
    """Says that it equals data parallelism, and adds gradients up where it should average them."""

    name = "broken-sums-gradients"
    equals_data_parallel = True

    def reduced(self, group: Any, parts: list[Any]) -> list[Any]:
        return list(group.all_reduce(parts, "sum"))


class StandsStill(Strategy):
    """Computes the loss and trains nothing."""

    name = "broken-stands-still"
    summary = "broken"
    requires = frozenset({Capability.GRADIENTS})

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        return group.gradients(batch)[1]


class NeedsSamples(_Local):
    """Cannot do with fewer samples than replicas."""

    name = "broken-needs-samples"

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        assert batch.size // group.replicas > 0, "no samples for everybody"
        return super().step(group, batch, learning_rate)


class NeedsOthers(_Local):
    """Cannot do alone."""

    name = "broken-needs-others"

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        return super().step(group, batch, learning_rate / (group.replicas - 1))


class ForgetsSmallGradients(_Reducing):
    """Says that gradients arrive in the end, and sends the larger half of them alone."""

    name = "broken-forgets-small-gradients"
    invariants = frozenset({Invariant.GRADIENT_SUM})

    def reduced(self, group: Any, parts: list[Any]) -> list[Any]:
        sent = []
        for part in parts:
            values = group.numpy(part)
            large = np.abs(values) >= np.median(np.abs(values))
            sent.append(group.tensor(np.where(large, values, 0.0)))
        return super().reduced(group, sent)


class KeepsToItself(_Reducing):
    """Adds half of the gradients before to each, and gives nobody what it keeps of them."""

    name = "broken-keeps-to-itself"

    def __init__(self) -> None:
        self._before: list[Any] = []

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        gradients, loss = group.gradients(batch)
        means = [
            super(KeepsToItself, self).reduced(group, list(p)) for p in zip(*gradients, strict=True)
        ]
        before = self._before or [[part * 0 for part in parts] for parts in means]
        sums = [
            [now + then * 0.5 for now, then in zip(*pair, strict=True)]
            for pair in zip(means, before, strict=True)
        ]
        self._before = means
        group.apply_gradients(list(zip(*sums, strict=True)), learning_rate)
        return loss


class Misdescribed(_Local):
    """Requires something that is no capability, though it is spelled like one."""

    name = "broken-misdescribed"
    requires = frozenset({"local-step", "average-parameters"})  # type: ignore[assignment]


class KeepsNewsBack(Sharded):
    """Sharded, but replica 0 does not tell the others what it has made of its weights."""

    name = "broken-keeps-news-back"
    summary = "broken"
    requires = Sharded.requires | {Capability.NAMED_STATE}

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        before = group.read_state(("trainable",))
        loss = super().step(group, batch, learning_rate)
        if 0 not in group.local_replicas:
            (replica,) = group.local_replicas
            own = {p for lot in self._shard_buckets for p in lot.bucket.weights_of(replica)}
            others = [name for place, name in enumerate(before) if place not in own]
            group.write_state({name: before[name] for name in others})
        return loss


class AppliesInHalves(_Reducing):
    """Says that it applies sums in one order, and rounds twice where the group rounds once."""

    name = "broken-applies-in-halves"
    applies_ordered_sums = True

    def apply_gradients(self, group: Any, gradients: Any, learning_rate: float) -> None:
        for _ in range(2):
            group.apply_gradients(gradients, learning_rate / 2)


class PromisesTooMuch(_Local):
    """Says that slots are shared out, and leaves each replica all of them."""

    name = "broken-promises-too-much"

    def state_bytes(self, model: ModelBytes, replicas: int) -> StateBytes:
        whole = model.replicated
        return StateBytes(whole.weights, whole.gradients, whole.slots // replicas)


class KeepsResiduals(_Reducing):
    """Says that it is elastic, and keeps the smaller half of each replica's gradients for the next step."""

    name = "broken-keeps-residuals"

    def __init__(self) -> None:
        self._residuals: list[np.ndarray] = []

    def why_not_elastic(self) -> None:
        """None, wrongly."""

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        self._before, self._residuals = iter(self._residuals), []
        return super().step(group, batch, learning_rate)

    def reduced(self, group: Any, parts: list[Any]) -> list[Any]:
        wanted = group.numpy(parts[0]) + next(self._before, 0.0)
        is_large = np.abs(wanted) >= np.median(np.abs(wanted))
        self._residuals.append(np.where(is_large, 0.0, wanted))
        return super().reduced(group, [group.tensor(np.where(is_large, wanted, 0.0))])


class StepsBeforeItAverages(_Local):
    """Says that it is elastic, and changes weights before the last exchange of a step."""

    name = "broken-steps-before-it-averages"

    def why_not_elastic(self) -> None:
        """None, wrongly."""


class AppliesBeforeItEnds(_Reducing):
    """Says that it is elastic, and exchanges something after it has changed all weights."""

    name = "broken-applies-before-it-ends"

    def why_not_elastic(self) -> None:
        """None, wrongly."""

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        loss = super().step(group, batch, learning_rate)
        return group.all_reduce([loss] * len(group.local_replicas), "mean")[0]


class EqualTooEarly(_Local):
    """Says that all replicas have the same weights after each step, and averages every second one."""

    name = "broken-equal-too-early"
    keeps_replicas_equal = "finally"

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        if batch.step % 2:
            return super().step(group, batch, learning_rate)
        return group.local_step(batch, learning_rate)

    def finished(self, group: Any) -> None:
        group.average_parameters()

    def why_not_elastic(self) -> None:
        """None, as it has savepoints."""

    def is_savepoint(self, step: int) -> bool:
        return True  # wrongly


BROKEN = (
    Undeclared,
    WrongLoss,
    NeverAverages,
    SometimesEqual,
    RootTakesAll,
    SumsGradients,
    StandsStill,
    NeedsSamples,
    NeedsOthers,
    ForgetsSmallGradients,
    KeepsToItself,
    Misdescribed,
    KeepsNewsBack,
    AppliesInHalves,
    PromisesTooMuch,
    KeepsResiduals,
    StepsBeforeItAverages,
    AppliesBeforeItEnds,
    EqualTooEarly,
)


@hookimpl
def isotrain_register_strategies(register: StrategyRegistry) -> None:
    """Registers every one of them."""
    for strategy in BROKEN:
        register.add(strategy)
