"""Copies between tensors, shards of tensors, and NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.without_values import lacks_values
from isotrain.plugin import IsotrainError, SpecError


@dataclass(frozen=True, eq=False)
class TensorShard:
    """This process's shard of a tensor that is sharded without `DTensor`.

    Attributes:
        local: The shard.
        shape: Shape of the full tensor.
        offset: Start of the shard in the full tensor, along each axis.
    """

    local: torch.Tensor
    shape: torch.Size
    offset: Sequence[int]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.local.dtype

    def dim(self) -> int:
        """Rank (number of axes) of the tensor."""
        return len(self.shape)

    def detach(self) -> TensorShard:
        """The shard without autograd history, in the same memory."""
        return replace(self, local=self.local.detach())


TensorOrShard: TypeAlias = torch.Tensor | TensorShard
"""A full tensor (or a `DTensor`), or a shard."""


def overwrite(name: str, target: TensorOrShard, value: torch.Tensor) -> None:
    """Copies `value` into `target`, which keeps its dtype and device. Local.

    Args:
        name: Name of the tensor, for messages.
        target: Tensor or shard to overwrite, any shape.
        value: Full tensor or shard, in the shape of either.

    Raises:
        IsotrainError: The shapes differ.
    """
    if target.shape != value.shape and local_shard(target).shape != value.shape:
        raise IsotrainError(
            f"{name!r} has shape {tuple(target.shape)} in this model, and the given state has"
            f" {tuple(value.shape)}."
        )
    shard = local_shard(target)
    if shard is not target and shard.shape != value.shape:
        value = value[shard_slices(target)]
    fill(shard, value)


def fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a tensor into another one of its shape, which may be sparse or expanded (stride 0)."""
    if target.layout != value.layout:
        value = value.to(target.dtype).to_sparse(layout=target.layout)
    unexpanded(target).copy_(unexpanded(value, of=target))


def unexpanded(tensor: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """View of a tensor without the repetitions of expanded axes: its own, or those of `of`, same shape."""
    of = tensor if of is None else of
    for axis, stride in enumerate(of.stride() if of.layout == torch.strided else ()):
        if stride == 0 and of.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def local_shard(tensor: TensorOrShard) -> torch.Tensor:
    """This process's shard, in its local shape, of a `TensorShard` or `DTensor`; other tensors unchanged."""
    if isinstance(tensor, TensorShard):
        return tensor.local
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_slices(tensor: TensorOrShard) -> tuple[slice, ...]:
    """Slices of the full tensor that this process's shard covers, one per axis.

    FSDP2's `fully_shard` shards axis 0 along the last axis of the device mesh and replicates along others.
    """
    if isinstance(tensor, TensorShard):
        extents = zip(tensor.offset, tensor.local.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in extents)
    mesh = tensor.device_mesh
    axis = mesh.ndim - 1
    rows, *others = tensor.shape
    start = min(rows, mesh.get_local_rank(axis) * -(-rows // mesh.size(axis)))
    return slice(start, start + len(local_shard(tensor))), *(slice(0, size) for size in others)


def copied(tensor: TensorOrShard, into: np.ndarray | None) -> np.ndarray:
    """Copy as by `to_numpy`, written into an existing array if that has the same shape and dtype."""
    tensor = local_shard(tensor)
    if into is None or into.shape != tuple(tensor.shape):
        return to_numpy(tensor)
    target = torch.from_numpy(into)
    if target.dtype != (torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype):
        return to_numpy(tensor)
    target.copy_(tensor.detach())
    return into


def to_numpy(tensor: TensorOrShard) -> np.ndarray:
    """Copy of a tensor or local shard as a dense array; bfloat16, which NumPy lacks, becomes float32."""
    tensor = local_shard(tensor.detach())
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    array: np.ndarray = copy.numpy()  # an array of the tensor itself would keep its memory alive
    return array


def make_contiguous(weights: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor]) -> None:
    """Gives weights of any shapes the strides of new tensors, in memory of their own if they had others.

    Kernels take a weight by its strides, and add in another order for other strides.

    Args:
        weights: Weights by name.
        others: Tensors of the model, with or without the weights.

    Raises:
        SpecError: A weight with other strides shares its elements with another tensor.
    """
    tensors = [*weights.values(), *others]
    for name, weight in weights.items():
        if weight.layout != torch.strided or lacks_values(weight):
            continue
        if weight.stride() == weight.new_empty(weight.shape, device="meta").stride():
            continue
        if any(share_elements(weight, each) for each in tensors if each is not weight):
            raise SpecError(
                f"reproducible: expected contiguous weights, received {name!r} with strides"
                f" {weight.stride()}, which shares its memory with another tensor of the model. Use one"
                " parameter in both places, or give it memory of its own: torch.nn.Parameter(x.clone())."
            )
        weight.data = weight.data.clone(memory_format=torch.contiguous_format)


def separate_gradients(weights: Iterable[torch.Tensor]) -> None:
    """Gives each gradient in `.grad` memory of its own. Local, after a backward pass.

    Autograd may give the terms of a sum one gradient, as in `x @ (a.t() + b.t())`. torch adds to gradients,
    clips and scales them in place, and would change such memory once for each of them.

    Args:
        weights: Weights of any shapes.
    """
    spans = sorted(
        (gradient.data_ptr(), gradient.nbytes, index, weight)
        for index, weight in enumerate(weights)
        if type(gradient := weight.grad) is torch.Tensor and gradient.layout == torch.strided
    )
    end = 0
    for start, size, _, weight in spans:
        if start < end and weight.grad is not None:
            weight.grad = weight.grad.clone()
        end = max(end, start + size)


def share_elements(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, any shapes, have an element of memory in common; False without values."""
    if other.layout != torch.strided or tensor.dtype != other.dtype or lacks_values(other):
        return False
    if private_api.storage_of(tensor) != private_api.storage_of(other):
        return False
    marked = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=torch.bool)
    view, other_view = (
        marked.as_strided(each.shape, each.stride(), each.storage_offset())
        for each in (tensor, other)
    )
    view.fill_(True)
    return bool(other_view.any())


@contextlib.contextmanager
def restored_after(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restores tensors of any shape, such as statistics that a placeholder batch must not change."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        restore(tensors, before)


def restore(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copies values back into those of the tensors, of any shape, that have changed."""
    for tensor, value in zip(tensors, values, strict=True):
        has_values = tensor.layout == torch.strided and not lacks_values(tensor)
        if not has_values or not torch.equal(tensor, value):
            with torch.no_grad():
                fill(tensor, value)
