"""DiLoCo: local steps, and an outer optimizer that takes the replicas' mean change as its gradient.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105,
algorithm 1, with the outer Nesterov momentum of its section 2. Fragments, overlap and gradients in few bits:
Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, algorithm 2; error
feedback: Karimireddy et al., arXiv 1901.09847.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.plugin import (
    AVERAGED,
    Batch,
    Capability,
    Plan,
    PlanError,
    Replica,
    ReplicaGroup,
    StrategyState,
    Tensor,
    TrainingSpec,
    UnsupportedError,
)
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import (
    SliceWeightSums,
    as_trainable,
    average_parts,
    average_statistics,
    read_trainable,
)
from isotrain.strategies.few_bits import BLOCK, mean_from_few_bits, to_few_bits
from isotrain.strategies.local_sgd import LocalSGD

_STATE = ("outer", "momentum", "residual")
_MIX = 0.5


@dataclass
class _Fragment:
    """A range of the vector of all trainable weights, which is exchanged at once.

    Attributes:
        start: Index of its first element.
        stop: Index after its last one.
        state: For each local replica outer weights, momentum and, in few bits, the residual: vectors.
        counts: Samples since its last exchange began.
    """

    start: int
    stop: int
    state: list[list[Tensor]]
    counts: SliceWeightSums


@dataclass
class _Exchange:
    """An exchange under way.

    Attributes:
        fragment: Index of the fragment.
        steps_left: Local steps until the outer step is taken.
        wait: Waits for the mean outer gradient: one vector for each local replica. To be called once.
    """

    fragment: int
    steps_left: int
    wait: Callable[[], list[Tensor]]


class DiLoCo(LocalSGD):
    """Local steps; every `every` of them, one step of an outer optimizer on the weights all have in common.

    The outer gradient is how far the replicas have moved from these weights, as a mean over their samples.
    Each fragment of the weights has its outer steps at steps of its own.
    """

    name = "diloco"
    summary = (
        "local steps; every k of them an outer step with momentum, in parts, 8 or 4 bits if wanted"
    )

    def __init__(
        self,
        every: Any = 500,
        start: int = 0,
        outer_rate: float = 0.7,
        outer_momentum: float = 0.9,
        bits: int | None = None,
        fragments: int = 1,
        overlap: int = 0,
        mix: float | None = None,
    ) -> None:
        """Checks the options.

        Args:
            every: Local steps between outer steps (H in the paper), as of `local-sgd`.
            start: Number of synchronous steps at the start.
            outer_rate: Learning rate of the outer optimizer.
            outer_momentum: Its Nesterov momentum; 0 for none.
            bits: Bits in which an element of the outer gradient is sent, 8 or 4; None for its own dtype.
            fragments: Number of parts of the weights, each of which is exchanged at steps of its own.
            overlap: Local steps that are taken while an exchange goes on (tau in the paper).
            mix: Part of a replica's own weights in those that it goes on with after an exchange that
                overlapped (alpha in the paper); None for a half.

        Raises:
            PlanError: An option has a bad value.
        """
        super().__init__(every, start)
        self.equals_data_parallel = False
        rate = option_checks.positive(self.name, "outer_rate", outer_rate)
        option_checks.fraction_or_zero(self.name, "outer_momentum", outer_momentum)
        if bits not in (None, 4, 8):
            raise option_checks.option_error(self.name, "bits", "8, 4 or none", bits)
        self._outer = (rate, float(outer_momentum))
        self._bits = bits
        self._fragment_count = option_checks.whole_number(self.name, "fragments", fragments, 1)
        self._overlap = option_checks.whole_number(self.name, "overlap", overlap, 0)
        self._check_schedule(every, mix)
        self._mix = _MIX if mix is None else float(mix)
        if overlap:
            without = "each exchange is waited for, with the same results"
            self.prefers = {Capability.ASYNCHRONOUS_COLLECTIVES: without}
        self._element_count = 0
        self._fragments: list[_Fragment] = []
        self._under_way: list[_Exchange] = []

    def _check_schedule(self, every: Any, mix: Any) -> None:
        """Checks whether the options of fragments and overlap fit each other and `every`.

        Raises:
            PlanError: They do not.
        """
        fragments, overlap = self._fragment_count, self._overlap
        (_, steps), *changes = self._phases
        if changes and (fragments > 1 or overlap):
            expected = "a number, with fragments or overlap"
            raise option_checks.option_error(self.name, "every", expected, every)
        if fragments > steps:
            expected = f"at most {steps}, as every"
            raise option_checks.option_error(self.name, "fragments", expected, fragments)
        if overlap and overlap >= steps:
            expected = f"less than every, {steps}"
            raise option_checks.option_error(self.name, "overlap", expected, overlap)
        if mix is None:
            return
        if not overlap:
            raise PlanError(
                f"strategy {self.name}: mix needs overlap: set overlap, or leave mix out."
            )
        option_checks.fraction_or_zero(self.name, "mix", mix)

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        """Keeps the number of trainable weights' elements, for `exchanged_bytes`."""
        super().configure(spec, plan)
        self._element_count = sum(map(math.prod, plan.weight_shapes or ()))

    def started(self, group: ReplicaGroup) -> None:
        """Takes the replicas' weights as the outer ones, with a momentum of zero.

        Leaves out exchanges under way, whose group may have lost members.
        """
        vectors = group.compute(read_trainable)
        count, length = self._fragment_count, vectors[0].shape[0]
        bounds = [length * index // count for index in range(count + 1)]
        self._under_way = []
        self._fragments = []
        for start, stop in itertools.pairwise(bounds):
            state = group.compute(initial_state, vectors, static=(start, stop, bool(self._bits)))
            self._fragments.append(_Fragment(start, stop, state, SliceWeightSums()))

    def state_written(self, group: ReplicaGroup) -> None:
        """Begins anew with the weights that were written, once all exchanges are done."""
        for exchange in self._under_way:
            exchange.wait()
        self.started(group)

    def _begin_local_steps(self, group: ReplicaGroup) -> None:
        self.started(group)

    def _local_step_taken(self, group: ReplicaGroup, batch: Batch) -> None:
        """Begins the exchanges of this step, and takes the outer steps that are due after it. Collective.

        One that is due later is taken now where its fragment is exchanged again, as after a seek.
        """
        for fragment in self._fragments:
            fragment.counts.add(batch)
        begun = self._exchanged_after(batch.step)
        waiting = []
        for exchange in self._under_way:
            exchange.steps_left -= 1
            if exchange.steps_left > 0 and exchange.fragment not in begun:
                waiting.append(exchange)
            else:
                self._take_outer_step(group, exchange)
        self._under_way = waiting
        for index in begun:
            exchange = self._begin_exchange(group, index)
            if self._overlap:
                self._under_way.append(exchange)
            else:
                self._take_outer_step(group, exchange)

    def _exchanged_after(self, step: int) -> list[int]:
        """Indices of the fragments whose exchange begins after a step; equal on all ranks."""
        if self._fragment_count == 1:
            return [0] if self.is_averaged_after(step) else []
        first, every = self._phases[-1]
        taken = step + 1 - first
        offsets = (
            every * (index + 1) // self._fragment_count for index in range(self._fragment_count)
        )
        return [index for index, offset in enumerate(offsets) if (taken - offset) % every == 0]

    def _begin_exchange(self, group: ReplicaGroup, index: int) -> _Exchange:
        """Begins to exchange the outer gradients of a fragment. Collective.

        Moving statistics are averaged with the last fragment, as in a synchronous step.
        """
        fragment = self._fragments[index]
        weights = fragment.counts.means(group)
        fragment.counts = SliceWeightSums()
        if index == self._fragment_count - 1:
            group.compute(average_statistics, *weights)
        static = (fragment.start, fragment.stop, self._bits)
        sent = group.compute(outer_gradient, fragment.state, *weights, static=static)
        if self._bits is None:
            means = group.all_reduce_async([each[0] for each in sent], "mean")
            return _Exchange(index, self._overlap, means)
        for state, (*_, errors) in zip(fragment.state, sent, strict=True):
            state[2] = errors
        packed, scales = (
            group.all_gather_async([each[place] for each in sent]) for place in (0, 1)
        )
        decoding = (self._bits, fragment.stop - fragment.start)

        def wait() -> list[Tensor]:
            return group.compute(decoded_mean, packed(), scales(), static=decoding)

        return _Exchange(index, self._overlap, wait)

    def _take_outer_step(self, group: ReplicaGroup, exchange: _Exchange) -> None:
        """Takes the outer step of an exchange, and sets the replica's weights. Local, once it is done.

        The replica's own weights are mixed in where it took local steps since the exchange began.
        """
        fragment = self._fragments[exchange.fragment]
        mix = self._mix if fragment.counts.steps else 0.0
        static = (fragment.start, *self._outer, mix)
        fragment.state = group.compute(outer_step, fragment.state, exchange.wait(), static=static)

    def finished(self, group: ReplicaGroup) -> None:
        """Ends the exchanges, takes outer steps for the last local ones, and gives all the outer weights."""
        for exchange in self._under_way:
            self._take_outer_step(group, exchange)
        self._under_way = []
        for index, fragment in enumerate(self._fragments):
            if fragment.counts.steps:
                self._take_outer_step(group, self._begin_exchange(group, index))

    def sync_weights(self, group: ReplicaGroup) -> None:
        """Averages the weights, weighted by the samples since all of them were exchanged. Collective."""
        counts = max((each.counts for each in self._fragments), key=lambda each: each.steps)
        group.compute(average_parts, *counts.means(group), static=AVERAGED)

    def state(self, group: ReplicaGroup) -> StrategyState:
        """Outer weights, momentum and means under way; samples and residual of each replica. Local.

        Exchanges under way are waited for. All but the samples are vectors of the trainable weights.
        """
        values = {
            "steps": [each.counts.steps for each in self._fragments],
            "even": [each.counts.even for each in self._fragments],
            "local": self._is_local,
            "under_way": [[each.fragment, each.steps_left] for each in self._under_way],
        }
        outer, momentum = (self._vector(group, 0, place) for place in (0, 1))
        tensors = {"outer": outer, "momentum": momentum}
        if self._under_way:
            tensors["mean"] = np.zeros_like(outer)
        for exchange in self._under_way:
            fragment, means = self._fragments[exchange.fragment], exchange.wait()
            exchange.wait = _done(means)
            tensors["mean"][fragment.start : fragment.stop] = group.numpy(means[0])
        per_replica = {}
        for local, replica in enumerate(group.local_replicas):
            sums = [
                each.counts.sums[local] if each.counts.sums else 0.0 for each in self._fragments
            ]
            per_replica[replica] = {"samples": np.array(sums)}
            if self._bits:
                per_replica[replica]["residual"] = self._vector(group, local, 2)
        return StrategyState(values, tensors, per_replica)

    def _vector(self, group: ReplicaGroup, local: int, place: int) -> np.ndarray:
        """A vector of the state of a local replica, of all fragments. Local."""
        return np.concatenate([group.numpy(each.state[local][place]) for each in self._fragments])

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:
        """Restores all of it; samples and residuals only with the same number of replicas.

        Exchanges under way have at most `overlap` local steps left, whatever it was before.

        Raises:
            UnsupportedError: The state is of another number of fragments.
        """
        self.state_written(group)
        values, count = state.values, self._fragment_count
        self._is_local = values["local"]
        if len(values["steps"]) != count:
            raise UnsupportedError(
                f"strategy {self.name}: fragments: the checkpoint has {len(values['steps'])}, the spec"
                f" {count}. Resume with as many as in the checkpoint."
            )
        for local, replica in enumerate(group.local_replicas):
            arrays = {**state.tensors, **state.per_replica.get(replica, {})}
            for fragment in self._fragments:
                tensors = fragment.state[local]
                for place, name in enumerate(_STATE[: len(tensors)]):
                    if name in arrays:
                        part = arrays[name][fragment.start : fragment.stop].copy()
                        tensors[place] = group.tensor(part)
        for fragment in self._fragments:
            fragment.state = group.compute(as_weights, fragment.state)
        if state.per_replica:
            samples = [state.per_replica[replica]["samples"] for replica in group.local_replicas]
            for index, (steps, even) in enumerate(
                zip(values["steps"], values["even"], strict=True)
            ):
                sums = [float(each[index]) for each in samples] if steps else []
                self._fragments[index].counts = SliceWeightSums(sums, steps, even)
        for index, steps_left in values["under_way"]:
            fragment = self._fragments[index]
            mean = group.tensor(state.tensors["mean"][fragment.start : fragment.stop].copy())
            means = group.compute(as_trainable, [mean] * len(group.local_replicas))
            self._under_way.append(_Exchange(index, min(steps_left, self._overlap), _done(means)))

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Notes that the outer momentum, or each replica's residual, is lost."""
        if strategy_before != self.name:
            return [f"{self.name}: the outer momentum starts at zero, from the current weights"]
        if self._bits and replicas_before != replicas:
            return [f"{self.name}: what rounding to {self._bits} bits has left to send"]
        return []

    def why_not_elastic(self) -> str | None:
        """Reason why the others cannot go on: an option with which weights are never equal; None: none."""
        if self._fragment_count > 1:
            return (
                "with fragments, the weights of replicas are never all equal; leave fragments out"
            )
        if self._overlap:
            return "with overlap, the weights of replicas are never all equal; leave overlap out"
        return None

    def _averaged_part(self, step: int) -> float:
        return len(self._exchanged_after(step)) / self._fragment_count

    def _averaging_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes of a ring all-reduce; in few bits, those of an all-gather of elements and scales."""
        if self._bits is None or not self._element_count:
            return super()._averaging_bytes(gradient_bytes, replicas)
        return (replicas - 1) * (self._element_count * self._bits / 8 + gradient_bytes / BLOCK)


def _done(means: list[Tensor]) -> Callable[[], list[Tensor]]:
    """The wait for an exchange that is done."""
    return lambda: means


def initial_state(
    replica: Replica, vector: Tensor, *, static: tuple[int, int, bool]
) -> list[Tensor]:
    """A fragment of a vector, zero momentum and, in few bits, zero residual. Local.

    Args:
        replica: The replica that runs this computation.
        vector: All trainable weights.
        static: First element, the one after the last, and whether there is a residual.
    """
    start, stop, has_residual = static
    outer = vector[start:stop]
    zeros = [replica.ops.zeros_like(outer) for _ in ("momentum", "residual")]
    return [outer, *(zeros if has_residual else zeros[:1])]


def as_weights(replica: Replica, state: list[Tensor]) -> list[Tensor]:
    """The state's vectors in the dtype in which weights are read. Local."""
    return [as_trainable(replica, vector) for vector in state]


def outer_gradient(
    replica: Replica,
    state: list[Tensor],
    weight: Tensor | None = None,
    *,
    static: tuple[int, int, int | None],
) -> list[Tensor]:
    """Outer gradient of this replica: the outer weights of a fragment, less its own ones. Local.

    Args:
        replica: The replica that runs this computation.
        state: Outer weights, momentum and, in few bits, the residual, of the fragment.
        weight: Weight of this replica in means, a scalar; None for 1.
        static: First element of the fragment, the one after its last, and number of bits or None.

    Returns:
        A vector; in few bits, what `to_few_bits` returns of it and the residual.
    """
    start, stop, bits = static
    gradient = state[0] - replica.read_range(start, stop)
    if weight is not None:
        gradient = gradient * replica.ops.cast(weight, gradient.dtype)
    if bits is None:
        return [gradient]
    return list(to_few_bits(replica.ops, gradient + state[2], bits))


def decoded_mean(
    replica: Replica, packed: Tensor, scales: Tensor, *, static: tuple[int, int]
) -> Tensor:
    """Mean of gathered vectors in few bits; `static` has the bits and the length. Local."""
    return mean_from_few_bits(replica, packed, scales, *static)


def outer_step(
    replica: Replica,
    state: list[Tensor],
    mean: Tensor,
    *,
    static: tuple[int, float, float, float],
) -> list[Tensor]:
    """A step of the outer optimizer on a fragment, SGD with Nesterov momentum. Local.

    Args:
        replica: The replica that runs this computation, whose weights move to the outer ones.
        state: Outer weights, momentum and, in few bits, the residual, of the fragment.
        mean: Mean outer gradient.
        static: First element of the fragment, learning rate, momentum, and the part of the replica's own
            weights in its new ones.

    Returns:
        The new state.
    """
    start, rate, decay, mix = static
    outer, momentum, *residual = state
    momentum = decay * momentum + mean
    outer = outer - rate * (mean + decay * momentum)
    weights = outer
    if mix:
        own = replica.read_range(start, start + outer.shape[0])
        weights = mix * own + (1 - mix) * outer
    replica.write_range(start, weights)
    return [outer, momentum, *residual]
