"""Where a model is cut into stages, and how often each stage is replicated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from isotrain.core.errors import PlanError
from isotrain.core.pipeline.profile import Cut, LayerCost, ModelProfile


@dataclass(frozen=True)
class PipelineSplit:
    """Into how many chunks, and where.

    Attributes:
        chunks: Of the model; chunk c is on stage c modulo the number of stages.
        first: The names of the layers with which the chunks after the first begin; none: where the backend
            finds them balanced, the same on every process.
        modules: Of a native model, the names of the modules that it applies one after the other, or patterns
            of these; none: as the model itself says.
    """

    chunks: int
    first: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Layers that are computed together.

    Attributes:
        layers: Of it, in order.
        workers: Over how many its part of a micro-batch is spread.
        sent_bytes: What it gives to the stage behind it, for a micro-batch.
    """

    layers: tuple[LayerCost, ...]
    workers: int
    sent_bytes: int

    @property
    def seconds(self) -> float:
        """Forward and backward, of one micro-batch on one worker."""
        return sum(layer.seconds for layer in self.layers)


@dataclass(frozen=True)
class Partition:
    """A model, cut.

    Attributes:
        stages: From the inputs on.
        seconds: From one micro-batch to the next: what the slowest stage or transfer takes.
    """

    stages: tuple[Stage, ...]
    seconds: float

    @property
    def workers(self) -> int:
        """Of all stages."""
        return sum(stage.workers for stage in self.stages)


@dataclass(frozen=True)
class Partitioner:
    """The dynamic program of PipeDream (Narayanan et al. 2019, arXiv:1806.03377, section 3.1), on graphs.

    In its notation, with cuts of a graph in the place of the places in a chain: one stage between two cuts on
    m workers takes, for a micro-batch,

        T(i -> j, m) = max(sum of T_l, sum of W_l(m)) / m

    where T_l is the time of forward and backward pass of layer l, and W_l(m) = 4 (m - 1) |w_l| / (m B) that
    in which m workers bring its gradients together and get its weights, at B bytes a second. The best
    pipeline up to a cut j on m workers is the best over one stage, and over all smaller cuts i and m' < m of

        A(j, m) = max(A(i, m - m'), 2 C_i, T(i -> j, m'))

    where C_i = a_i / B is the time in which what crosses the cut i is sent; its gradients come back.

    Attributes:
        profile: Of the model.
        bandwidth: Bytes a second between workers.
    """

    profile: ModelProfile
    bandwidth: float

    @cached_property
    def _cuts(self) -> list[Cut]:
        return self.profile.cuts()

    def stage_seconds(self, first: Cut, second: Cut, workers: int) -> float:
        """T: what a stage takes for a micro-batch, computing or exchanging gradients."""
        computing = self.profile.seconds(first, second)
        moved = 4 * (workers - 1) * self.profile.weight_bytes(first, second) / workers
        return max(computing, moved / self.bandwidth) / workers

    def transfer_seconds(self, cut: Cut) -> float:
        """2 C: what sending over a cut takes, forward and backward."""
        return 2 * self.profile.crossing_bytes(cut) / self.bandwidth

    def best(self, workers: int) -> Partition:
        """The cuts and the replication whose slowest stage or transfer is fastest, on so many workers."""
        found: dict[tuple[Cut, int], tuple[float, tuple[tuple[Cut, int], ...]]] = {}
        for cut in self._cuts[1:]:
            for count in range(1, workers + 1):
                options = self._options(cut, count, found)
                found[cut, count] = min(options, key=lambda option: (option[0], len(option[1])))
        seconds, stages = found[self.profile.whole, workers]
        return self._partition(stages, seconds)

    def _options(
        self,
        cut: Cut,
        workers: int,
        found: dict[tuple[Cut, int], tuple[float, tuple[tuple[Cut, int], ...]]],
    ) -> Iterator[tuple[float, tuple[tuple[Cut, int], ...]]]:
        """What A is the smallest of: the seconds, and the stages' ends and workers."""
        yield self.stage_seconds(0, cut, workers), ((cut, workers),)
        for before in self._cuts[1:]:
            if before.bit_count() >= cut.bit_count():
                return
            if before & ~cut:
                continue
            sending = self.transfer_seconds(before)
            for own in range(1, workers):
                seconds, stages = found[before, workers - own]
                last = self.stage_seconds(before, cut, own)
                yield max(seconds, sending, last), (*stages, (cut, own))

    def balanced(self, stages: int) -> Partition:
        """The cuts into so many stages, of one worker each, whose slowest stage is fastest (GPipe's).

        Of those, the ones over which least is sent.

        Raises:
            PlanError: There are fewer layers than stages.
        """
        if stages > len(self.profile.layers):
            raise PlanError(
                f"pipeline: {stages} stages for {len(self.profile.layers)} layers; each needs one."
            )
        profile = self.profile
        seconds, _ = self._chain(
            stages, lambda slowest, before, cut: max(slowest, profile.seconds(before, cut))
        )
        # Only then: what sends least up to a cut need not be the fastest up to there.
        _, cuts = self._chain(
            stages,
            lambda sent, before, cut: (
                sent + profile.crossing_bytes(cut)
                if profile.seconds(before, cut) <= seconds
                else math.inf
            ),
        )
        return self._partition(tuple((cut, 1) for cut in cuts), seconds)

    def _chain(
        self, stages: int, extended: Callable[[float, Cut, Cut], float]
    ) -> tuple[float, tuple[Cut, ...]]:
        """The ends of so many stages that cost least.

        Args:
            stages: How many.
            extended: What stages cost with one more behind them, from what they cost without it and the cuts
                between which it is; it never falls.
        """
        found: dict[Cut, tuple[float, tuple[Cut, ...]]] = {0: (0.0, ())}
        for number in range(1, stages + 1):
            ends = [self.profile.whole] if number == stages else self._cuts[1:-1]
            found = {
                cut: min(options)
                for cut in ends
                if (
                    options := [
                        (extended(cost, before, cut), (*cuts, cut))
                        for before, (cost, cuts) in found.items()
                        if before != cut and not before & ~cut
                    ]
                )
            }
        return found[self.profile.whole]

    def _partition(self, ends: tuple[tuple[Cut, int], ...], seconds: float) -> Partition:
        stages, before = [], 0
        for cut, workers in ends:
            layers = tuple(self.profile.within(before, cut))
            stages.append(Stage(layers, workers, self.profile.crossing_bytes(cut)))
            before = cut
        return Partition(tuple(stages), seconds)
