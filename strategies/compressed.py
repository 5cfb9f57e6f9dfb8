"""Synchronous data parallelism with gradient compression: fp16, bf16, top-k or PowerSGD.

Compression is the backend's own where it has one (a DDP communication hook, for example); elsewhere it is
computed neutrally, after the backward pass. The backend's own overlaps with the backward pass in 16 bits; for
PowerSGD only its uncompressed first steps do.

* top-k sparsification: Aji and Heafield, arXiv 1704.05021
* error feedback: Stich et al., "Sparsified SGD with Memory", arXiv 1809.07599; Karimireddy et al., "Error
  Feedback Fixes SignSGD", arXiv 1901.09847
* PowerSGD: Vogels et al., arXiv 1905.13727, algorithms 1 and 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from isotrain.plugin import (
    Batch,
    Capability,
    CompressingGroup,
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
    TensorFunctions,
    TrainingSpec,
    flatten,
    unflatten,
)
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import average_statistics

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
_INDEX_BYTES = 4
_SEED = 1905_13727


class Compressed(Strategy):
    """Every step applies the mean of the replicas' compressed gradients."""

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
            ratio: topk: fraction of the gradient elements that is sent (0.01).
            rank: powersgd: rank of the approximation that is sent (2).
            start: powersgd: number of uncompressed steps at the start (10), 2 or more.
            native: Whether to use the backend's native compression where it has one.

        Raises:
            PlanError: An option has a bad value, or is for another method.
        """
        self._method: CompressionMethod = method
        option_checks.one_of(self.name, "method", method, ("fp16", "bf16", "topk", "powersgd"))
        self._refuse_for_other("topk", "ratio", ratio)
        self._refuse_for_other("powersgd", "rank", rank)
        self._refuse_for_other("powersgd", "start", start)
        self._ratio = option_checks.fraction(self.name, "ratio", 0.01 if ratio is None else ratio)
        self._rank = option_checks.whole_number(self.name, "rank", 2 if rank is None else rank, 1)
        self._start = option_checks.whole_number(
            self.name, "start", 10 if start is None else start, 2
        )
        self._wants_native = option_checks.boolean(self.name, "native", native)
        if method == "powersgd":
            self.warm_up_steps = self._start + 1
        if method in ("topk", "powersgd"):
            self.invariants = frozenset({Invariant.GRADIENT_SUM})  # by error feedback
        if method == "bf16":
            self.requires = self.requires | {Capability.BFLOAT16_COLLECTIVES}
        self._is_native = False
        self._state: list[Any] = []
        self._shapes: Sequence[tuple[int, ...]] = ()

    def _refuse_for_other(self, method: str, option: str, value: Any) -> None:
        if value is not None and self._method != method:
            raise PlanError(
                f"strategy {self.name}: {option} is an option of method {method!r}, but method is"
                f" {self._method!r}."
            )

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses float16."""
        option_checks.refuse_float16(self.name, spec, "compresses gradients without a loss scale")
        if plan.replicas == 1:
            return ["compressed: a single replica sends no gradients, so none are compressed"]
        return []

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        """Keeps the weights' shapes."""
        self._shapes = plan.weight_shapes or ()

    def started(self, group: ReplicaGroup) -> None:
        """Requests native compression; without it, creates the state of the neutral one."""
        native = (
            self._wants_native
            and isinstance(group, CompressingGroup)
            and group.compress(self._method, self._rank, self._start)
        )
        self._is_native = native or group.replicas == 1
        if not self._is_native:
            weights = list(group.read_state(("trainable",)).values())
            initial = self._initial_state(weights)
            self._state = [[group.tensor(array) for array in initial] for _ in group.local_replicas]

    def _initial_state(self, weights: list[np.ndarray]) -> list[np.ndarray]:
        """The state of one replica before the first step.

        Args:
            weights: Trainable weights, of any shape and dtype.

        Returns:
            Topk: the residual, a vector as long as all weights. powersgd: a residual per compressed matrix,
            shape [rows, columns], then a right factor per matrix, shape [columns, rank]. Else nothing.
        """
        if self._method == "topk":
            dtypes = [weight.dtype for weight in weights]
            return [np.zeros(sum(weight.size for weight in weights), np.result_type(*dtypes))]
        if self._method == "powersgd":
            return _initial_low_rank_state(weights, self._rank)
        return []

    def state(self, group: ReplicaGroup) -> StrategyState:
        """Residuals of each replica, and the right factors, which are equal on all replicas.

        The state of native compression belongs to the backend.
        """
        count = self._residual_count()
        right_factors = self._state[0][count:] if self._state else []
        return StrategyState(
            tensors={f"right/{i}": group.numpy(right) for i, right in enumerate(right_factors)},
            per_replica={
                replica: {f"residual/{i}": group.numpy(r) for i, r in enumerate(tensors[:count])}
                for replica, tensors in zip(group.local_replicas, self._state, strict=False)
            },
        )

    def _residual_count(self) -> int:
        """Number of residuals: the first tensors of a replica's state."""
        tensors = self._state[0] if self._state else []
        return len(tensors) // 2 if self._method == "powersgd" else len(tensors)

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:
        """Restores residuals and right factors; there are none after natively compressed steps."""
        count = self._residual_count()
        right_factors = [state.tensors[name] for name in sorted(state.tensors, key=_index)]
        for tensors, replica in zip(self._state, group.local_replicas, strict=False):
            by_name = state.per_replica.get(replica, {})
            residuals = [by_name[name] for name in sorted(by_name, key=_index)]
            tensors[:count] = map(group.tensor, residuals) if residuals else tensors[:count]
            tensors[count:] = map(group.tensor, right_factors) if right_factors else tensors[count:]

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Notes that residuals are lost with another strategy or number of replicas."""
        same = (strategy_before, replicas_before) == (self.name, replicas)
        if same or self._method not in ("topk", "powersgd"):
            return []
        if strategy_before == self.name:
            return [f"{self.name}: the gradient residuals (error feedback) until now"]
        return [f"{self.name}: starts without gradient residuals (error feedback)"]

    def why_not_elastic(self) -> str | None:
        """None for the methods in 16 bits, which keep nothing from step to step."""
        if self._method in _DTYPES:
            return None
        return (
            f"method {self._method} keeps on each replica what it has not sent yet (error feedback), and that"
            f" of a lost replica is lost with it; {' and '.join(_DTYPES)} keep nothing"
        )

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Computes gradients, reduces them compressed, applies their mean. Returns the scalar mean loss."""
        if self._is_native or (self._method == "powersgd" and batch.step < self._start):
            return group.synchronous_step(batch, learning_rate)
        gradients, loss = group.gradients(batch)
        computation, static = self._computation()
        weights = group.replica_weights(batch)
        results = group.compute(computation, gradients, self._state, *weights, static=static)
        self._state = [list(state) for _, state in results]
        group.apply_gradients([means for means, _ in results], learning_rate)
        return loss

    def _computation(self) -> tuple[Computation, Any]:
        """The method's computation, and its `static` argument."""
        if self._method == "topk":
            return exchange_top_k, self._ratio
        if self._method == "powersgd":
            return exchange_low_rank, self._rank
        return exchange_low_precision, _DTYPES[self._method]

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float | None:
        """Bytes that the method sends per step (PowerSGD: in a compressed step).

        A ring all-reduce sends 2 (n - 1) / n of a tensor; an all-gather n - 1 times its local part.
        """
        if not self._shapes:
            return None
        count = sum(map(math.prod, self._shapes))
        element_bytes = gradient_bytes / count
        all_reduce = 2 * (replicas - 1) / replicas
        if self._method == "topk":
            return (replicas - 1) * top_k_count(count, self._ratio) * (element_bytes + _INDEX_BYTES)
        if self._method == "powersgd":
            sent = sum(_elements_sent(shape, self._rank) for shape in self._shapes)
            return all_reduce * element_bytes * sent
        return all_reduce * count * 2


Exchanged = tuple[list[Tensor], list[Tensor]]
"""The mean gradients, in their shapes; and the replica's state for the next step."""


def exchange_low_precision(
    replica: Replica,
    gradients: list[Tensor],
    state: list[Tensor],
    weight: Tensor | None = None,
    *,
    static: str,
) -> Exchanged:
    """All-reduces gradients, divided by the number of replicas, in a 16-bit dtype. Collective.

    Args:
        replica: The replica that runs this computation.
        gradients: Local gradients, of any shape.
        state: Unused.
        weight: Weight of this replica, a scalar; see `average_statistics`.
        static: Dtype to send.
    """
    average_statistics(replica, weight)
    vector = flatten(replica.ops, gradients)
    sent = replica.ops.cast(vector / replica.replicas, static)
    mean = replica.ops.cast(replica.all_reduce(sent), vector.dtype)
    return unflatten(replica.ops, mean, gradients), []


def exchange_top_k(
    replica: Replica,
    gradients: list[Tensor],
    state: list[Tensor],
    weight: Tensor | None = None,
    *,
    static: float,
) -> Exchanged:
    """Top-k with error feedback: sends the largest elements, and adds the rest to the next step. Collective.

    Args:
        replica: The replica that runs this computation.
        gradients: Local gradients, of any shape.
        state: The residual: what was not sent so far, a vector as long as all gradients.
        weight: Weight of this replica, a scalar; see `average_statistics`.
        static: Fraction of the elements to send.
    """
    average_statistics(replica, weight)
    ops = replica.ops
    vector = flatten(ops, gradients) + state[0]
    indices, values = top_k(replica, vector, top_k_count(vector.shape[0], static))
    sent = _scatter(ops, indices, values, vector.shape[0])
    all_indices, all_values = replica.all_gather(indices), replica.all_gather(values)
    total = ops.zeros_like(vector)
    for r in range(replica.replicas):  # in this order everywhere, for equal sums
        total = total + _scatter(ops, all_indices[r], all_values[r], vector.shape[0])
    return unflatten(ops, total / replica.replicas, gradients), [vector - sent]


def _scatter(ops: TensorFunctions, indices: Tensor, values: Tensor, length: int) -> Tensor:
    """Vector of zeros but for values at int32 indices, both of shape `[n]`."""
    return ops.scatter(ops.reshape(indices, (-1, 1)), values, (length,))


def top_k_count(count: int, ratio: float) -> int:
    """Number of elements to send, of `count`: at least one."""
    return max(1, round(count * ratio))


def top_k(replica: Replica, vector: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices (int32) and values of the `count` elements largest in magnitude, in no order."""
    ops = replica.ops
    _, indices = ops.top_k(ops.abs(vector), count, sorted=False)
    return ops.cast(indices, "int32"), ops.take(vector, indices)


def exchange_low_rank(
    replica: Replica,
    gradients: list[Tensor],
    state: list[Tensor],
    weight: Tensor | None = None,
    *,
    static: int,
) -> Exchanged:
    """PowerSGD: sends matrices as low-rank products, with error feedback. Collective.

    Tensors that a low-rank product would not make smaller are sent uncompressed.

    Args:
        replica: The replica that runs this computation.
        gradients: Local gradients, of any shape.
        state: Per matrix its residual, shape [rows, columns]; then per matrix its right factor, shape
            [columns, rank].
        weight: Weight of this replica, a scalar; see `average_statistics`.
        static: Rank of the approximation.
    """
    ops = replica.ops
    average_statistics(replica, weight)
    compressed = [i for i, g in enumerate(gradients) if is_worthwhile(tuple(g.shape), static)]
    others = [i for i in range(len(gradients)) if i not in compressed]
    residuals, rights = state[: len(compressed)], state[len(compressed) :]
    matrices = [
        ops.reshape(gradients[i], residual.shape) + residual
        for i, residual in zip(compressed, residuals, strict=True)
    ]
    lefts = [m @ right for m, right in zip(matrices, rights, strict=True)]
    means = all_reduce_means(replica, [*lefts, *(gradients[i] for i in others)])
    lefts = [ops.qr(left)[0] for left in means[: len(compressed)]]
    local_rights = [ops.transpose(m) @ left for m, left in zip(matrices, lefts, strict=True)]
    rights = all_reduce_means(replica, local_rights)
    residuals = [
        m - left @ ops.transpose(right)
        for m, left, right in zip(matrices, lefts, local_rights, strict=True)
    ]
    results = dict(zip(others, means[len(compressed) :], strict=True))
    for i, left, right in zip(compressed, lefts, rights, strict=True):
        results[i] = ops.reshape(left @ ops.transpose(right), gradients[i].shape)
    return [results[i] for i in range(len(gradients))], [*residuals, *rights]


def all_reduce_means(replica: Replica, tensors: list[Tensor]) -> list[Tensor]:
    """Means of tensors of any shapes over all replicas, by one all-reduce. Collective."""
    if not tensors:
        return []
    mean = replica.all_reduce(flatten(replica.ops, tensors), "mean")
    return unflatten(replica.ops, mean, tensors)


def is_worthwhile(shape: tuple[int, ...], rank: int) -> bool:
    """Whether a tensor, as a matrix of `shape[0]` rows, has more elements than its two factors."""
    if len(shape) < 2:
        return False
    rows, columns = as_matrix(shape)
    return (rows + columns) * rank < rows * columns


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor that is viewed as a matrix."""
    return shape[0], math.prod(shape[1:])


def _index(name: str) -> int:
    """The index at the end of a tensor's name, such as 3 of `residual/3`."""
    return int(name.rpartition("/")[2])


def _elements_sent(shape: tuple[int, ...], rank: int) -> int:
    """Elements that PowerSGD sends of a tensor: of its two factors, or of the tensor itself."""
    return sum(as_matrix(shape)) * rank if is_worthwhile(shape, rank) else math.prod(shape)


def _initial_low_rank_state(weights: list[np.ndarray], rank: int) -> list[np.ndarray]:
    """Zero residuals, shape [rows, columns]; and right factors, shape [columns, rank].

    The factors are random normal, with a fixed seed: equal on every replica.
    """
    generator = np.random.default_rng(_SEED)
    matrices = [weight for weight in weights if is_worthwhile(weight.shape, rank)]
    residuals = [np.zeros(as_matrix(m.shape), m.dtype) for m in matrices]
    rights = [
        generator.standard_normal((as_matrix(m.shape)[1], rank)).astype(m.dtype) for m in matrices
    ]
    return [*residuals, *rights]
