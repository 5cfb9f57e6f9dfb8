"""Gathers weights as a forward pass reads them, without saving them for the backward pass.

The backward pass gathers a weight again when it needs it (saved-tensor hooks).
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.sharded.weights import ShardedWeights
from isotrain.plugin import SpecError


class _WeightRef(NamedTuple):
    """Reference to a weight in a dtype: what is saved instead of its data."""

    weight_index: int
    dtype: torch.dtype


class _WeightViewRef(NamedTuple):
    """Reference to a strided view of a weight."""

    ref: _WeightRef
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class GatheredReads:
    """Reads of sharded weights during one forward pass."""

    def __init__(self, weights: ShardedWeights) -> None:
        """Prepares a forward pass.

        Args:
            weights: Sharded weights.
        """
        self._weights = weights
        self._refs_by_storage: dict[Hashable, _WeightRef] = {}

    @contextlib.contextmanager
    def without_saving_weights(self) -> Iterator[None]:
        """Context in which autograd saves references to weights instead of the weights.

        Raises:
            SpecError: Something takes gradients by torch.func.
        """
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise SpecError(
                "strategy sharded: a layer takes gradients by torch.func, which saves the weights that it"
                f" reads, and stage=3 frees them. Use stage 1 or 2. torch says: {error}"
            ) from error

    def empty_like(self, index: int) -> torch.Tensor:
        """Empty tensor, shape `[0]`, with a weight's dtype and device."""
        return self._weights.parameters[index].new_empty(0)

    def read(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Gathers a weight, in its shape; its gradient goes to the parameter, which has no data."""
        data = self._gather(_WeightRef(index, dtype))
        weight: torch.Tensor = _GatheredWeight.apply(self._weights.parameters[index], data)
        return weight

    def _gather(self, ref: _WeightRef) -> torch.Tensor:
        """Gathers the data of a weight, in its shape; `_pack` will not save it."""
        data = self._weights.read(*ref)
        self._refs_by_storage[private_api.storage_of(data)] = ref
        return data

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _WeightRef | _WeightViewRef:
        """Saves a reference in place of a weight or a view of it, any shape; other tensors as they are."""
        if tensor.layout is not torch.strided:
            return tensor
        storage = private_api.storage_of(tensor)
        if (index := self._weights.absent.get(storage)) is not None:
            return _WeightRef(index, tensor.dtype)
        ref = self._refs_by_storage.get(storage)
        if ref is None or tensor.dtype != ref.dtype or tensor.is_conj() or tensor.is_neg():
            return (
                tensor  # also a weight reinterpreted in another dtype, which cannot be gathered so
            )
        return _WeightViewRef(ref, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: torch.Tensor | _WeightRef | _WeightViewRef) -> torch.Tensor:
        """Undoes `_pack`: gathers what a reference refers to, in its shape and dtype."""
        if isinstance(saved, torch.Tensor):
            return saved
        if isinstance(saved, _WeightRef):
            return self._gather(saved)
        return self._gather(saved.ref).as_strided(saved.size, saved.stride, saved.offset)


class _GatheredWeight(torch.autograd.Function):
    """Gathered data as a function of the parameter without data, so that the parameter gets the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """The gathered data, in the weight's shape."""
        return data.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: Any) -> None:
        """Saves the parameter's dtype."""
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gradient of the parameter, dense, in its shape and dtype."""
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return dense.to(ctx.dtype), None
