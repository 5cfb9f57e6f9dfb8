"""Tensors from NumPy arrays, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from isotrain.plugin import IsotrainError


@dataclass(frozen=True, eq=False)
class TensorShard:
    """What this process has of a tensor that lies in parts, where that is no `DTensor`.

    Attributes:
        own: The part.
        shape: Of the whole.
        offset: Where in it the part begins.
    """

    own: torch.Tensor
    shape: torch.Size
    offset: Sequence[int]

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""
        return self.own.dtype

    def dim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def detach(self) -> TensorShard:
        """The same memory, without gradients."""
        return replace(self, own=self.own.detach())


TensorOrShard: TypeAlias = torch.Tensor | TensorShard
"""What a process has of a tensor: all of it, or a part."""


def overwrite(name: str, target: TensorOrShard, value: torch.Tensor) -> None:
    """Copies `value` into `target`, which keeps its dtype and device.

    Raises:
        IsotrainError: The shapes differ.
    """
    if target.shape != value.shape and local_shard(target).shape != value.shape:
        raise IsotrainError(
            f"{name!r} has shape {tuple(target.shape)} in this model, and the given state has"
            f" {tuple(value.shape)}."
        )
    own = local_shard(target)
    if own is not target and own.shape != value.shape:
        value = value[shard_slices(target)]
    fill(own, value)


def fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a tensor into another, which may be sparse, or expanded."""
    if target.layout != value.layout:
        value = value.to(target.dtype).to_sparse(layout=target.layout)
    unexpanded(target).copy_(unexpanded(value, of=target))


def unexpanded(tensor: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """The part of a tensor in which none of its numbers, or of those of another of its shape, is twice."""
    of = tensor if of is None else of
    for axis, stride in enumerate(of.stride() if of.layout == torch.strided else ()):
        if stride == 0 and of.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def local_shard(tensor: TensorOrShard) -> torch.Tensor:
    """What this process has of a tensor: all of it, or the part of a `DTensor`."""
    if isinstance(tensor, TensorShard):
        return tensor.own
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_slices(tensor: TensorOrShard) -> tuple[slice, ...]:
    """Where in the whole of a tensor this process's part is.

    `fully_shard` cuts by rows. The last axis of the mesh of a `DTensor` is that of the parts; along another,
    all have the same.
    """
    if isinstance(tensor, TensorShard):
        ends = zip(tensor.offset, tensor.own.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in ends)
    mesh = tensor.device_mesh
    axis = mesh.ndim - 1
    rows, *others = tensor.shape
    start = min(rows, mesh.get_local_rank(axis) * -(-rows // mesh.size(axis)))
    return slice(start, start + len(local_shard(tensor))), *(slice(0, size) for size in others)


def copied(tensor: TensorOrShard, into: np.ndarray | None) -> np.ndarray:
    """As `to_numpy`, in the memory of an array that is there already, where it has the shape and type."""
    tensor = local_shard(tensor)
    if into is None or into.shape != tuple(tensor.shape):
        return to_numpy(tensor)
    kept = torch.from_numpy(into)
    if kept.dtype != (torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype):
        return to_numpy(tensor)
    kept.copy_(tensor.detach())
    return into


def to_numpy(tensor: TensorOrShard) -> np.ndarray:
    """Copies a tensor to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    tensor = local_shard(tensor.detach())
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    array: np.ndarray = copy.numpy()  # of the tensor itself, it would never again let its memory go
    return array


@contextlib.contextmanager
def restored_after(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Undoes what its body does to tensors: a placeholder must not move the statistics."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                if tensor.layout != torch.strided or not torch.equal(tensor, value):
                    fill(tensor, value)
