"""Synchronous data parallelism whose gradients travel compressed.

Natively, overlapped with the backward pass, where the backend can; else by neutral computations. Top-k with
error feedback: Stich et al., "Sparsified SGD with Memory", arXiv 1809.07599, and Karimireddy et al., "Error
Feedback Fixes SignSGD", arXiv 1901.09847. PowerSGD: Vogels et al., arXiv 1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from isotrain.plugin import (
    Batch,
    Capability,
    CompressionMethod,
    Computation,
    Invariant,
    Plan,
    PlanError,
    Replica,
    ReplicaGroup,
    Strategy,
    StrategyState,
    Tensor,
    TrainingSpec,
)
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import average_statistics, weights_of_replicas
from isotrain.strategies.flatten import joined, separated

_TYPES = {"fp16": "float16", "bf16": "bfloat16"}
_INDEX_BYTES = 4
_SEED = 1905_13727


class Compressed(Strategy):
    """Every step, the mean of the replicas' compressed gradients."""

    name = "compressed"
    summary = (
        "synchronous: gradients sent as fp16, bf16, their top-k with error feedback, or PowerSGD"
    )
    requires = frozenset(
        {
            Capability.SYNCHRONOUS_STEP,
            Capability.GRADIENTS,
            Capability.APPLY_GRADIENTS,
            Capability.COMPUTE,
        }
    )
    keeps_replicas_equal = "always"

    def __init__(
        self,
        method: CompressionMethod,
        ratio: float | None = None,
        rank: int | None = None,
        start: int | None = None,
        native: bool = True,
    ) -> None:
        """Checks the options.

        Args:
            method: `fp16`, `bf16`, `topk` or `powersgd`.
            ratio: topk: the part of the gradient's elements that is sent (0.01).
            rank: powersgd: of the matrices that are sent (2).
            start: powersgd: uncompressed steps before it begins (10), 2 or more.
            native: Whether the backend's own compression is used where it has one.
        """
        self._method: CompressionMethod = method
        option_checks.one_of(self.name, "method", method, ("fp16", "bf16", "topk", "powersgd"))
        self._only("topk", "ratio", ratio)
        self._only("powersgd", "rank", rank)
        self._only("powersgd", "start", start)
        self._ratio = option_checks.fraction(self.name, "ratio", 0.01 if ratio is None else ratio)
        self._rank = option_checks.whole(self.name, "rank", 2 if rank is None else rank, 1)
        self._start = option_checks.whole(self.name, "start", 10 if start is None else start, 2)
        self._wants_native = option_checks.switch(self.name, "native", native)
        if method in ("topk", "powersgd"):
            self.invariants = frozenset({Invariant.GRADIENT_SUM})  # by error feedback
        if method == "bf16":
            self.requires = self.requires | {Capability.BFLOAT16_COLLECTIVES}
        self._is_native = False
        self._state: list[Any] = []
        self._shapes: Sequence[tuple[int, ...]] = ()

    def _only(self, method: str, option: str, value: Any) -> None:
        if value is not None and self._method != method:
            raise PlanError(
                f"strategy {self.name}: {option} is an option of method {method!r}, and method is"
                f" {self._method!r}."
            )

    def configure(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses loss scaling; notes the weights' shapes."""
        option_checks.without_loss_scaling(
            self.name, spec, "compresses gradients without a loss scale"
        )
        self._shapes = plan.weight_shapes or ()
        if plan.replicas == 1:
            return ["compressed: one replica sends nothing, and nothing is compressed"]
        return []

    def started(self, group: ReplicaGroup) -> None:
        """Asks for native compression; else makes what the neutral one remembers."""
        native = self._wants_native and group.compress(self._method, self._rank, self._start)
        self._is_native = native or group.replicas == 1
        if not self._is_native:
            weights = list(group.read_state(("trainable",)).values())
            remembered = self._remembered(weights)
            self._state = [
                [group.tensor(array) for array in remembered] for _ in group.local_replicas
            ]

    def _remembered(self, weights: list[np.ndarray]) -> list[np.ndarray]:
        """The state of one replica before the first step."""
        if self._method == "topk":
            kinds = [weight.dtype for weight in weights]
            return [np.zeros(sum(weight.size for weight in weights), np.result_type(*kinds))]
        if self._method == "powersgd":
            return _first_memory(weights, self._rank)
        return []

    def state(self, group: ReplicaGroup) -> StrategyState:
        """What each replica has held back; and the right factors, which all have alike.

        The backend's own compression is part of its state.
        """
        held = self._held_back()
        first = self._state[0][held:] if self._state else []
        return StrategyState(
            tensors={f"right/{i}": group.numpy(right) for i, right in enumerate(first)},
            per_replica={
                replica: {f"residual/{i}": group.numpy(r) for i, r in enumerate(own[:held])}
                for replica, own in zip(group.local_replicas, self._state, strict=False)
            },
        )

    def _held_back(self) -> int:
        """How many tensors at the start of a replica's memory are residuals."""
        own = self._state[0] if self._state else []
        return len(own) // 2 if self._method == "powersgd" else len(own)

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:
        """Remembers what there is: nothing after steps that the backend compressed itself."""
        held = self._held_back()
        rights = [state.tensors[name] for name in sorted(state.tensors, key=_number)]
        for own, replica in zip(self._state, group.local_replicas, strict=False):
            residuals = state.per_replica.get(replica, {})
            given = [residuals[name] for name in sorted(residuals, key=_number)]
            own[:held] = map(group.tensor, given) if given else own[:held]
            own[held:] = map(group.tensor, rights) if rights else own[held:]

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Says what becomes of that which was held back of the gradients."""
        same = (strategy_before, replicas_before) == (self.name, replicas)
        if same or self._method not in ("topk", "powersgd"):
            return []
        if strategy_before == self.name:
            return [f"{self.name}: what was held back of the gradients until now"]
        return [f"{self.name}: starts with nothing held back"]

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Computes gradients, exchanges them compressed, and applies their mean."""
        if self._is_native or (self._method == "powersgd" and batch.step < self._start):
            return group.synchronous_step(batch, learning_rate)
        gradients, loss = group.gradients(batch)
        computation, static = self._computation()
        weights = weights_of_replicas(group, batch)
        results = group.compute(computation, gradients, self._state, *weights, static=static)
        self._state = [list(state) for _, state in results]
        group.apply_gradients([own for own, _ in results], learning_rate)
        return loss

    def _computation(self) -> tuple[Computation, Any]:
        if self._method == "topk":
            return exchange_largest, self._ratio
        if self._method == "powersgd":
            return exchange_low_rank, self._rank
        return exchange_short, _TYPES[self._method]

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float | None:
        """What the method sends in a step (for PowerSGD, in one after its start)."""
        if not self._shapes:
            return None
        count = sum(map(math.prod, self._shapes))
        width = gradient_bytes / count
        reduced = 2 * (replicas - 1) / replicas
        if self._method == "topk":
            return (replicas - 1) * kept(count, self._ratio) * (width + _INDEX_BYTES)
        if self._method == "powersgd":
            return reduced * width * sum(_numbers_sent(s, self._rank) for s in self._shapes)
        return reduced * count * 2


Exchanged = tuple[list[Tensor], list[Tensor]]
"""The mean gradients, and what the replica remembers for the next step."""


def exchange_short(
    replica: Replica,
    gradients: list[Tensor],
    state: list[Tensor],
    weight: Tensor | None = None,
    *,
    static: str,
) -> Exchanged:
    """Sends gradients, divided by the number of replicas, as the type `static`."""
    average_statistics(replica, weight)
    vector = joined(replica.ops, gradients)
    sent = replica.ops.cast(vector / replica.replicas, static)
    mean = replica.ops.cast(replica.all_reduce(sent), vector.dtype)
    return separated(replica.ops, mean, gradients), []


def exchange_largest(
    replica: Replica,
    gradients: list[Tensor],
    state: list[Tensor],
    weight: Tensor | None = None,
    *,
    static: float,
) -> Exchanged:
    """Sends the largest elements, a fraction `static`, and remembers the others for the next step."""
    average_statistics(replica, weight)
    vector = joined(replica.ops, gradients) + state[0]
    places, values = largest(replica, vector, kept(vector.shape[0], static))
    own = replica.scatter_add(places, values, vector.shape[0])
    all_places, all_values = replica.all_gather(places), replica.all_gather(values)
    total = replica.ops.zeros_like(vector)
    for r in range(replica.replicas):  # in this order everywhere, for equal sums
        total = total + replica.scatter_add(all_places[r], all_values[r], vector.shape[0])
    return separated(replica.ops, total / replica.replicas, gradients), [vector - own]


def kept(count: int, ratio: float) -> int:
    """How many of `count` elements are sent: at least one."""
    return max(1, round(count * ratio))


def largest(replica: Replica, vector: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places (int32) and values of the elements that are largest in magnitude."""
    ops = replica.ops
    _, places = ops.top_k(ops.abs(vector), count, sorted=False)
    return ops.cast(places, "int32"), ops.take(vector, places)


def exchange_low_rank(
    replica: Replica,
    gradients: list[Tensor],
    state: list[Tensor],
    weight: Tensor | None = None,
    *,
    static: int,
) -> Exchanged:
    """PowerSGD: matrices as products of rank `static`, with error feedback; all else as it is.

    The state holds, for each matrix, what was left out of it, and the right factor.
    """
    ops = replica.ops
    average_statistics(replica, weight)
    chosen = [i for i, g in enumerate(gradients) if is_worthwhile(tuple(g.shape), static)]
    others = [i for i in range(len(gradients)) if i not in chosen]
    residuals, rights = state[: len(chosen)], state[len(chosen) :]
    matrices = [
        ops.reshape(gradients[i], residual.shape) + residual
        for i, residual in zip(chosen, residuals, strict=True)
    ]
    lefts = [m @ right for m, right in zip(matrices, rights, strict=True)]
    means = mean_of_each(replica, [*lefts, *(gradients[i] for i in others)])
    lefts = [ops.qr(left)[0] for left in means[: len(chosen)]]
    own = [ops.transpose(m) @ left for m, left in zip(matrices, lefts, strict=True)]
    rights = mean_of_each(replica, own)
    residuals = [
        m - left @ ops.transpose(right) for m, left, right in zip(matrices, lefts, own, strict=True)
    ]
    results = dict(zip(others, means[len(chosen) :], strict=True))
    for i, left, right in zip(chosen, lefts, rights, strict=True):
        results[i] = ops.reshape(left @ ops.transpose(right), gradients[i].shape)
    return [results[i] for i in range(len(gradients))], [*residuals, *rights]


def mean_of_each(replica: Replica, tensors: list[Tensor]) -> list[Tensor]:
    """The means of tensors over all replicas, in one exchange."""
    if not tensors:
        return []
    mean = replica.all_reduce(joined(replica.ops, tensors), "mean")
    return separated(replica.ops, mean, tensors)


def is_worthwhile(shape: tuple[int, ...], rank: int) -> bool:
    """Whether a tensor, as a matrix of `shape[0]` rows, is larger than its two factors."""
    if len(shape) < 2:
        return False
    rows, columns = as_matrix(shape)
    return (rows + columns) * rank < rows * columns


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix."""
    return shape[0], math.prod(shape[1:])


def _number(name: str) -> int:
    """The number at the end of a name."""
    return int(name.rpartition("/")[2])


def _numbers_sent(shape: tuple[int, ...], rank: int) -> int:
    return sum(as_matrix(shape)) * rank if is_worthwhile(shape, rank) else math.prod(shape)


def _first_memory(weights: list[np.ndarray], rank: int) -> list[np.ndarray]:
    """No residuals, and random right factors, the same on every replica."""
    generator = np.random.default_rng(_SEED)
    matrices = [weight for weight in weights if is_worthwhile(weight.shape, rank)]
    residuals = [np.zeros(as_matrix(m.shape), m.dtype) for m in matrices]
    rights = [
        generator.standard_normal((as_matrix(m.shape)[1], rank)).astype(m.dtype) for m in matrices
    ]
    return [*residuals, *rights]
