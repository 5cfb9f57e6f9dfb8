"""Weights that are joined as a forward pass reads them, and not kept for the backward pass.

What a backward pass wants of a weight is joined again when it comes to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.sharded.weights import ShardedWeights
from isotrain.plugin import SpecError


class _Whole(NamedTuple):
    """A weight, as it is read."""

    place: int
    dtype: torch.dtype


class _View(NamedTuple):
    """Of a weight, as an operation has it."""

    whole: _Whole
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class GatheredReads:
    """What a forward pass reads of weights that lie in parts."""

    def __init__(self, weights: ShardedWeights) -> None:
        """Has read nothing yet."""
        self._weights = weights
        self._read: dict[Hashable, _Whole] = {}

    @contextlib.contextmanager
    def without_saving_weights(self) -> Iterator[None]:
        """Within it, operations keep for the backward pass how to get weights again.

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
                "strategy sharded: a layer takes gradients by torch.func, which keeps the weights that it"
                f" reads, and with stage=3 they are let go. Take stage 1 or 2. torch says: {error}"
            ) from error

    def sample_of(self, place: int) -> torch.Tensor:
        """Of a weight's type, on its device, without numbers."""
        return self._weights.parameters[place].new_empty(0)

    def read(self, place: int, dtype: torch.dtype) -> torch.Tensor:
        """A weight whose gradient is that of the parameter, which has no numbers."""
        numbers = self._joined(_Whole(place, dtype))
        found: torch.Tensor = _Read.apply(self._weights.parameters[place], numbers)
        return found

    def _joined(self, whole: _Whole) -> torch.Tensor:
        """Its numbers, of which `_pack` keeps none."""
        numbers = self._weights.read(*whole)
        self._read[private_api.storage_of(numbers)] = whole
        return numbers

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Whole | _View:
        """Keeps of a weight, or of what is a view of it, how to get it again."""
        if tensor.layout is not torch.strided:
            return tensor
        storage = private_api.storage_of(tensor)
        if (place := self._weights.absent.get(storage)) is not None:
            return _Whole(place, tensor.dtype)
        whole = self._read.get(storage)
        if whole is None or tensor.dtype != whole.dtype or tensor.is_conj() or tensor.is_neg():
            return tensor  # also of a weight whose numbers are read as others, which are not joined
        return _View(whole, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, kept: torch.Tensor | _Whole | _View) -> torch.Tensor:
        """Undoes `_pack`."""
        if isinstance(kept, torch.Tensor):
            return kept
        if isinstance(kept, _Whole):
            return self._joined(kept)
        return self._joined(kept.whole).as_strided(kept.size, kept.stride, kept.offset)


class _Read(torch.autograd.Function):
    """A weight's numbers, with the gradient of the parameter, which has none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return whole.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return dense.to(ctx.dtype), None
