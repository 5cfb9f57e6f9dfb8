"""Splits a model into pipeline stages, and decides how often to replicate each stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from isotrain.core.errors import PlanError
from isotrain.core.pipeline.profile import Cut, LayerCost, ModelProfile
from isotrain.core.quantities import counted


@dataclass(frozen=True)
class PipelineSplit:
    """Number of chunks of a model, and where they begin.

    Attributes:
        chunks: Number of chunks; chunk c is on stage c modulo the number of stages.
        first_layers: Name of the first layer of each chunk but the first one; empty where the backend
            balances the chunks, equally on every process.
        modules: For a native model: names of the modules that it applies one after the other, or patterns of
            names; empty where the model is sequential itself.
    """

    chunks: int
    first_layers: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """A stage of a partition.

    Attributes:
        layers: Layers of the stage, in order.
        workers: Number of workers that divide each micro-batch among them.
        sent_bytes: Bytes of activations that it sends to later stages, per micro-batch.
    """

    layers: tuple[LayerCost, ...]
    workers: int
    sent_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward pass, for one micro-batch on one worker."""
        return sum(layer.seconds for layer in self.layers)


@dataclass(frozen=True)
class Partition:
    """A model split into stages.

    Attributes:
        stages: Stages, from the inputs to the outputs.
        seconds: Seconds per micro-batch: those of the slowest stage or transfer.
    """

    stages: tuple[Stage, ...]
    seconds: float

    @property
    def workers(self) -> int:
        """Number of workers of all stages."""
        return sum(stage.workers for stage in self.stages)


@dataclass(frozen=True)
class Partitioner:
    """The dynamic program of PipeDream (Narayanan et al. 2019, arXiv:1806.03377, section 3.1), on graphs.

    In its notation, with cuts of a graph instead of positions in a chain: one stage between two cuts on m
    workers takes, for a micro-batch,

        T(i -> j, m) = (sum of T_l) / m + (sum of W_l(m) + O_l) / u

    where T_l is the time of forward and backward pass of layer l, W_l(m) = 2 (m - 1) |w_l| / (m B) that
    in which m workers all-reduce its gradients in a ring, at B bytes per second in each direction, and O_l
    that of the optimizer's update, once in u micro-batches. T_l of the last layer includes the loss.
    Unlike in the paper, they do so once no more passes are left, and not meanwhile; and u may
    be more than m, where gradients are accumulated. The best pipeline up to a
    cut j on m workers is the best of a single stage, and of all smaller cuts i and m' < m in

        A(j, m) = max(A(i, m - m'), 2 C_i, T(i -> j, m'))

    where C_i = a_i / B is the time to send the activations that cross the cut i; their gradients come back.

    Attributes:
        profile: Layers of the model, with their times and bytes.
        bandwidth: Bytes per second between workers, in each direction.
        update: Number of micro-batches of an update; None where each worker of a stage computes one.
    """

    profile: ModelProfile
    bandwidth: float
    update: int | None = None

    @cached_property
    def _cuts(self) -> list[Cut]:
        return self.profile.cuts()

    def stage_seconds(self, first: Cut, second: Cut, workers: int) -> float:
        """T: seconds of a stage per micro-batch, of compute, gradient exchange and update."""
        profile = self.profile
        loss = profile.loss_seconds if second == profile.whole else 0.0
        compute = (profile.seconds(first, second) + loss) / workers
        weight_bytes = profile.weight_bytes(first, second)
        exchange = exchange_seconds(weight_bytes, workers, self.bandwidth)
        update = profile.update_seconds(first, second)
        return compute + (exchange + update) / (self.update or workers)

    def transfer_seconds(self, cut: Cut) -> float:
        """2 C: seconds to send over a cut, forward and backward, per micro-batch."""
        return 2 * self.profile.crossing_bytes(cut) / self.bandwidth

    def best(self, workers: int) -> Partition:
        """The partition and replication with the fastest bottleneck (stage or transfer) on these workers."""
        best_until: dict[tuple[Cut, int], tuple[float, tuple[tuple[Cut, int], ...]]] = {}
        for cut in self._cuts[1:]:
            for count in range(1, workers + 1):
                options = self._options(cut, count, best_until)
                best_until[cut, count] = min(
                    options, key=lambda option: (option[0], len(option[1]))
                )
        seconds, stages = best_until[self.profile.whole, workers]
        return self._partition(stages, seconds)

    def _options(
        self,
        cut: Cut,
        workers: int,
        best_until: dict[tuple[Cut, int], tuple[float, tuple[tuple[Cut, int], ...]]],
    ) -> Iterator[tuple[float, tuple[tuple[Cut, int], ...]]]:
        """The candidates of which A is the minimum: seconds, and the end cut and workers of each stage."""
        yield self.stage_seconds(0, cut, workers), ((cut, workers),)
        for before in self._cuts[1:]:
            if before.bit_count() >= cut.bit_count():
                return
            if before & ~cut:
                continue
            transfer = self.transfer_seconds(before)
            for count in range(1, workers):
                seconds, stages = best_until[before, workers - count]
                last = self.stage_seconds(before, cut, count)
                yield max(seconds, transfer, last), (*stages, (cut, count))

    def balanced(self, stages: int) -> Partition:
        """The partition into stages of one worker each with the fastest slowest stage (GPipe's).

        Among equals, the one that sends fewest bytes.

        Raises:
            PlanError: There are fewer layers than stages.
        """
        if stages > len(self.profile.layers):
            raise PlanError(
                f"pipeline: {counted(stages, 'stage')} for {counted(len(self.profile.layers), 'layer')}; each"
                " needs one."
            )
        profile = self.profile
        seconds, _ = self._chain(
            stages, lambda slowest, before, cut: max(slowest, profile.seconds(before, cut))
        )
        # In a second pass: the prefix that sends least need not be the fastest up to its cut.
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
        self, stages: int, extend: Callable[[float, Cut, Cut], float]
    ) -> tuple[float, tuple[Cut, ...]]:
        """The cheapest chain of this number of stages: its cost, and the end cut of each stage.

        Args:
            stages: Number of stages.
            extend: Function from the cost of a chain, and the first and second cut of one more stage, to the
                cost with that stage; it never decreases.
        """
        cheapest: dict[Cut, tuple[float, tuple[Cut, ...]]] = {0: (0.0, ())}
        for number in range(1, stages + 1):
            ends = [self.profile.whole] if number == stages else self._cuts[1:-1]
            cheapest = {
                cut: min(options)
                for cut in ends
                if (
                    options := [
                        (extend(cost, before, cut), (*cuts, cut))
                        for before, (cost, cuts) in cheapest.items()
                        if before != cut and not before & ~cut
                    ]
                )
            }
        return cheapest[self.profile.whole]

    def _partition(self, ends: tuple[tuple[Cut, int], ...], seconds: float) -> Partition:
        stages, before = [], 0
        for cut, workers in ends:
            layers = tuple(self.profile.within(before, cut))
            stages.append(Stage(layers, workers, self.profile.crossing_bytes(cut)))
            before = cut
        return Partition(tuple(stages), seconds)


def exchange_seconds(gradient_bytes: int, workers: int, bandwidth: float) -> float:
    """Seconds in which workers all-reduce gradients in a ring, at bytes per second in each direction."""
    return 2 * (workers - 1) / workers * gradient_bytes / bandwidth
