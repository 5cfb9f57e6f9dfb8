"""DiLoCo: local steps, and an outer optimizer that takes the replicas' mean change as its gradient.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105,
algorithm 1, with the outer Nesterov momentum of its section 2. Gradients in few bits: Douillard et al.,
"Streaming DiLoCo with overlapping communication", arXiv 2501.18512; error feedback: Karimireddy et al.,
arXiv 1901.09847.
"""

from __future__ import annotations

import math
from typing import Any

from isotrain.plugin import (
    Batch,
    Plan,
    Replica,
    ReplicaGroup,
    StrategyState,
    Tensor,
    TensorFunctions,
    TrainingSpec,
)
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import as_trainable, average_statistics, read_trainable
from isotrain.strategies.local_sgd import LocalSGD

_BLOCK = 256
"""Elements that share a scale."""
_TINY = 1e-30
_STATE = ("outer", "momentum", "residual")


class DiLoCo(LocalSGD):
    """Local steps; every `every` of them, one step of an outer optimizer on the weights all have in common.

    The outer gradient is how far the replicas have moved from these weights, as a mean over their samples.
    """

    name = "diloco"
    summary = "local steps; every k of them an outer step with momentum, in 8 or 4 bits if wanted"

    def __init__(
        self,
        every: Any = 500,
        start: int = 0,
        outer_rate: float = 0.7,
        outer_momentum: float = 0.9,
        bits: int | None = None,
    ) -> None:
        """Checks the options.

        Args:
            every: Local steps between outer steps (H in the paper), as of `local-sgd`.
            start: Number of synchronous steps at the start.
            outer_rate: Learning rate of the outer optimizer.
            outer_momentum: Its Nesterov momentum; 0 for none.
            bits: Bits in which an element of the outer gradient is sent, 8 or 4; None for its own dtype.

        Raises:
            PlanError: An option has a bad value.
        """
        super().__init__(every, start)
        self.equals_data_parallel = False
        rate = option_checks.positive(self.name, "outer_rate", outer_rate)
        if outer_momentum:
            option_checks.fraction(self.name, "outer_momentum", outer_momentum)
        if bits not in (None, 4, 8):
            raise option_checks.option_error(self.name, "bits", "8, 4 or none", bits)
        self._static = (rate, float(outer_momentum), bits)
        self._element_count = 0
        self._state: list[list[Tensor]] = []

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        """Keeps the number of trainable weights' elements, for `exchanged_bytes`."""
        super().configure(spec, plan)
        self._element_count = sum(map(math.prod, plan.weight_shapes or ()))

    def started(self, group: ReplicaGroup) -> None:
        """Takes the replicas' weights as the outer ones, with a momentum of zero."""
        self._state = group.compute(initial_state, static=self._static)

    def state_written(self, group: ReplicaGroup) -> None:
        """Begins anew with the weights that were written."""
        super().state_written(group)
        self.started(group)

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Takes a local step, and an outer one where it is due; synchronous steps before `start`.

        Returns the mean loss, a scalar.
        """
        if 0 < batch.step == self._start:
            self.started(group)
        return super().step(group, batch, learning_rate)

    def _synchronise(self, group: ReplicaGroup) -> None:
        """Takes an outer step, which gives all replicas the outer weights. Collective."""
        weights = self._replica_weights(group)
        self._state = group.compute(outer_step, self._state, *weights, static=self._static)

    def state(self, group: ReplicaGroup) -> StrategyState:
        """Outer weights and momentum; samples and residual of each replica: vectors of the weights."""
        counts = super().state(group)
        per_replica = {}
        for replica, (_, _, *residual) in zip(group.local_replicas, self._state, strict=True):
            arrays = dict(counts.per_replica.get(replica, {}))
            if residual:
                arrays["residual"] = group.numpy(residual[0])
            per_replica[replica] = arrays
        outer, momentum = map(group.numpy, self._state[0][:2])
        return StrategyState(counts.values, {"outer": outer, "momentum": momentum}, per_replica)

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:
        """Restores all of it; samples and residuals only with the same number of replicas."""
        super().load_state(group, state)
        for tensors, replica in zip(self._state, group.local_replicas, strict=True):
            arrays = {**state.tensors, **state.per_replica.get(replica, {})}
            for index, name in enumerate(_STATE[: len(tensors)]):
                if name in arrays:
                    tensors[index] = group.tensor(arrays[name])
        self._state = group.compute(as_weights, self._state)

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Notes that the outer momentum, or each replica's local weights and residual, are lost."""
        if strategy_before != self.name:
            return [f"{self.name}: the outer momentum starts at zero, from the current weights"]
        notes = super().resume_notes(strategy_before, replicas_before, replicas)
        if notes and self._static[2]:
            notes.append(f"{self.name}: what rounding to {self._static[2]} bits has left to send")
        return notes

    def _averaging_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes of a ring all-reduce; in few bits, those of an all-gather of elements and scales."""
        bits = self._static[2]
        if bits is None or not self._element_count:
            return super()._averaging_bytes(gradient_bytes, replicas)
        return (replicas - 1) * (self._element_count * bits / 8 + gradient_bytes / _BLOCK)


def initial_state(replica: Replica, *, static: tuple[float, float, int | None]) -> list[Tensor]:
    """The weights, zero momentum and, in few bits, zero residual: vectors of the trainable weights. Local."""
    outer = read_trainable(replica)
    zeros = [replica.ops.zeros_like(outer) for _ in ("momentum", "residual")]
    return [outer, *(zeros if static[2] else zeros[:1])]


def as_weights(replica: Replica, state: list[Tensor]) -> list[Tensor]:
    """The state's vectors in the dtype in which weights are read. Local."""
    return [as_trainable(replica, vector) for vector in state]


def outer_step(
    replica: Replica,
    state: list[Tensor],
    weight: Tensor | None = None,
    *,
    static: tuple[float, float, int | None],
) -> list[Tensor]:
    """A step of the outer optimizer, SGD with Nesterov momentum. Collective.

    Args:
        replica: The replica that runs this computation, whose weights become the outer ones.
        state: Outer weights, momentum and, in few bits, the residual: vectors of the trainable weights.
        weight: Weight of this replica in means, a scalar; None for 1.
        static: Learning rate, momentum, and number of bits or None.

    Returns:
        The new state.
    """
    rate, decay, bits = static
    outer, momentum, *residual = state
    average_statistics(replica, weight)
    gradient = outer - read_trainable(replica)
    if weight is not None:
        gradient = gradient * replica.ops.cast(weight, gradient.dtype)
    if bits is None:
        mean = replica.all_reduce(gradient, "mean")
    else:
        mean, residual[0] = mean_in_bits(replica, gradient + residual[0], bits)
    momentum = decay * momentum + mean
    outer = outer - rate * (mean + decay * momentum)
    replica.write(("trainable",), outer)
    return [outer, momentum, *residual]


def mean_in_bits(replica: Replica, vector: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Mean over all replicas of vectors that are sent in 8 or 4 bits an element. Collective.

    Blocks of 256 elements are divided by their largest magnitude and rounded to whole numbers.

    Returns:
        The mean, equal to the bit on all replicas; and what this replica has not sent: its rounding errors.
    """
    ops = replica.ops
    length = vector.shape[0]
    padding = ops.zeros((-length % _BLOCK,), vector.dtype)
    blocks = ops.reshape(ops.concatenate([vector, padding]), (-1, _BLOCK))
    scales = block_maxima(ops, ops.abs(blocks))
    scales = ops.maximum(scales, ops.zeros_like(scales) + _TINY)
    packed = pack(ops, blocks / scales, bits)
    all_packed, all_scales = replica.all_gather(packed), replica.all_gather(scales)
    total = ops.zeros_like(blocks)
    for index in range(replica.replicas):  # in this order everywhere, for equal sums
        total = total + unpack(ops, all_packed[index], bits, vector.dtype) * all_scales[index]
    sent = unpack(ops, packed, bits, vector.dtype) * scales
    mean, residual = total / replica.replicas, blocks - sent
    return ops.reshape(mean, (-1,))[:length], ops.reshape(residual, (-1,))[:length]


def block_maxima(ops: TensorFunctions, blocks: Tensor) -> Tensor:
    """Largest element of each row: shape `[rows, columns]`, a power of two, to `[rows, 1]`."""
    while blocks.shape[1] > 1:
        half = blocks.shape[1] // 2
        blocks = ops.maximum(blocks[:, :half], blocks[:, half:])
    return blocks


def pack(ops: TensorFunctions, blocks: Tensor, bits: int) -> Tensor:
    """Numbers from -1 to 1 as digits of int32s, each from -127 to 127, or from -7 to 7.

    Shape `[rows, columns]` to `[rows, columns * bits / 32]`.
    """
    largest = 2 ** (bits - 1) - 1
    digits = ops.cast(blocks * largest + (largest + 0.5), "int32") - largest  # the cast cuts off
    width = blocks.shape[1] * bits // 32
    packed = digits[:, -width:]
    for start in range(blocks.shape[1] - 2 * width, -1, -width):
        packed = packed * 2**bits + digits[:, start : start + width]
    return packed


def unpack(ops: TensorFunctions, packed: Tensor, bits: int, dtype: Any) -> Tensor:
    """The numbers from -1 to 1 that `pack` has rounded."""
    largest = 2 ** (bits - 1) - 1
    columns = []
    for _ in range(32 // bits):
        digit = (packed + largest) % 2**bits - largest
        packed = (packed - digit) // 2**bits
        columns.append(digit)
    return ops.cast(ops.concatenate(columns, axis=1), dtype) / largest
