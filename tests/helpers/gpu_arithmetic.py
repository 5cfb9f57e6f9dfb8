"""Arithmetic of GPUs on CPUs: sums in the order of NCCL's algorithms, and products of TF32.

NCCL's ring and double binary tree: Sanders et al., "Two-Tree Algorithms for Full Bandwidth Broadcast,
Reduction and Scan" (Parallel Computing 2009), and `src/graph/trees.cc` of NCCL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Sum = Callable[[Sequence[torch.Tensor]], torch.Tensor]
CHANNELS = 2
_DROPPED_BITS = 13
"""Bits of float32's 23-bit mantissa that TF32 lacks."""


def ring_sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of the ranks' tensors, of one shape and dtype, rounded to the dtype after each addition.

    Each channel has a part of the tensor, and a direction; each of its chunks begins at another rank.
    """
    ranks = range(len(terms))
    parts = []
    for channel, rows in enumerate(zip(*(_split(term, CHANNELS) for term in terms), strict=True)):
        ring = list(ranks) if channel % 2 == 0 else list(reversed(ranks))
        chunks = zip(*(_split(row, len(terms)) for row in rows), strict=True)
        for start, chunk in enumerate(chunks, 1):
            order = [ring[(start + hop) % len(ring)] for hop in ranks]
            parts.append(functools.reduce(torch.add, (chunk[rank] for rank in order)))
    return torch.cat(parts).view(terms[0].shape)


def tree_sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of the ranks' tensors, of one shape and dtype: each of two trees sums a half of it."""
    halves = list(zip(*(_split(term, 2) for term in terms), strict=True))
    other = list(reversed(halves[1])) if len(terms) % 2 == 0 else [*halves[1][1:], halves[1][0]]
    return torch.cat([_up_tree(halves[0]), _up_tree(other)]).view(terms[0].shape)


def _split(tensor: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    return torch.tensor_split(tensor.reshape(-1), count)


def _up_tree(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of tensors of one shape in a binary tree with rank 0 at its root."""
    children: dict[int, list[int]] = {rank: [] for rank in range(len(terms))}
    for rank in range(1, len(terms)):
        children[_parent(rank, len(terms))].append(rank)

    def total(rank: int) -> torch.Tensor:
        return functools.reduce(torch.add, map(total, children[rank]), terms[rank])

    return total(0)


def _parent(rank: int, ranks: int) -> int:
    bit = rank & -rank
    parent = (rank ^ bit) | (bit << 1)
    return parent if parent < ranks else rank ^ bit


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """The float32 tensor, any shape, with each mantissa rounded to 10 bits, half away from zero."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + (1 << (_DROPPED_BITS - 1))) >> _DROPPED_BITS << _DROPPED_BITS).view(
        torch.float32
    )


_PRODUCTS = {
    getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")
} | {torch.ops.aten.convolution_backward}
_ATOMIC_SUMS = {torch.ops.aten.sum, torch.ops.aten.mean}
_SCATTERS = {torch.ops.aten.index_add, torch.ops.aten.index_add_}


class GPUKernels(TorchDispatchMode):
    """Rounds what matrix products take to TF32, and sums rows in a random order.

    These are the rows of reductions, and those that gradients of embeddings and `index_add` add to one row.
    Only float32 is changed: GPUs compute float64 as it is, but for the order of sums.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self.rounded = self.shuffled = self.scattered = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        packet = function.overloadpacket
        if packet in _PRODUCTS:
            self.rounded += 1
            arguments = tuple(map(self._rounded, arguments))
        elif packet in _ATOMIC_SUMS and type(arguments[0]) is torch.Tensor and arguments[0].ndim:
            self.shuffled += 1
            arguments = (self._shuffled(*arguments[:2]), *arguments[1:])
        elif packet is torch.ops.aten.embedding_dense_backward:
            self.scattered += 1
            gradient, indices, *others = arguments
            rows = gradient.reshape(-1, gradient.shape[-1])
            order = self._order(len(rows))
            arguments = (rows[order], indices.reshape(-1)[order], *others)
        elif packet in _SCATTERS:
            self.scattered += 1
            tensor, axis, indices, source, *others = arguments
            order = self._order(len(indices))
            arguments = (
                tensor,
                axis,
                indices[order],
                source.index_select(axis, order),
                *others,
            )
        return function(*arguments, **(options or {}))

    def _order(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self._generator)

    @staticmethod
    def _rounded(value: Any) -> Any:
        is_float32 = type(value) is torch.Tensor and value.dtype == torch.float32
        return to_tf32(value) if is_float32 else value

    def _shuffled(self, tensor: torch.Tensor, axes: Any = None) -> torch.Tensor:
        """The tensor, whose sum over axes is requested, in another order along the first of these."""
        axis = axes[0] if isinstance(axes, list | tuple) and axes else 0
        return tensor.index_select(axis, self._order(tensor.shape[axis]))
