"""Weights of a Keras model that are joined when a layer reads them, and not kept for the backward pass.

What a backward pass wants of a weight is joined again when it comes to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import torch

from isotrain.adapters import keras_private
from isotrain.adapters.torch import private
from isotrain.adapters.torch.parted_weights import PartedWeights
from isotrain.plugin import SpecError


@contextlib.contextmanager
def reading(weights: PartedWeights, variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Within it, a Keras model computes with weights that lie in parts.

    Args:
        weights: They.
        variables: Of the model, in the same order.

    Raises:
        SpecError: A layer takes gradients by torch.func.
    """
    scope = _Reading(weights, variables)
    try:
        with scope, torch.autograd.graph.saved_tensors_hooks(scope.pack, scope.unpack):
            yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        raise SpecError(
            "strategy sharded: a layer takes gradients by torch.func, which keeps the weights that it reads,"
            f" and with stage=3 they are let go. Take stage 1 or 2. torch says: {error}"
        ) from error


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


class _Reading(keras.StatelessScope):
    """Gives weights, and has all else where it is."""

    def __init__(self, weights: PartedWeights, variables: Sequence[keras.Variable]) -> None:
        super().__init__(collect_losses=True)
        self._weights = weights
        self._places = {id(variable): place for place, variable in enumerate(variables)}
        self._read: dict[Hashable, _Whole] = {}

    def get_current_value(self, variable: keras.Variable) -> torch.Tensor | None:
        """A weight as it is read in this place; None for any other variable."""
        place = self._places.get(id(variable))
        if place is None:
            return None
        parameter = self._weights.parameters[place]
        sample = keras_private.as_read(variable, parameter.new_empty(0))
        found: torch.Tensor = _Read.apply(parameter, self._joined(_Whole(place, sample.dtype)))
        return found

    def _joined(self, whole: _Whole) -> torch.Tensor:
        """Its numbers, of which `pack` keeps none."""
        numbers = self._weights.read(*whole)
        self._read[private.storage_of(numbers)] = whole
        return numbers

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Sets what is no weight, as outside of any scope."""
        variable, value = update
        if id(variable) in self._places:
            raise SpecError(
                f"strategy sharded: a layer sets its trainable weight {variable.path} in a forward pass, and"
                " with stage=3 no replica has all of it. Take stage 1 or 2."
            )
        with torch.no_grad():
            variable.value.copy_(value)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        """Keeps of a weight, or of what is a view of it, how to get it again."""
        if tensor.layout is not torch.strided:
            return tensor
        whole = self._read.get(private.storage_of(tensor))
        if whole is None or tensor.dtype != whole.dtype or tensor.is_conj() or tensor.is_neg():
            return tensor  # also of a weight whose numbers are read as others, which are not joined
        return _View(whole, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: torch.Tensor | _View) -> torch.Tensor:
        """Undoes `pack`."""
        if isinstance(kept, torch.Tensor):
            return kept
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
        return gradient.to(ctx.dtype), None
