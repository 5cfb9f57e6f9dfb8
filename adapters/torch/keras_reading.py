"""Weights of a Keras model that are joined when a layer reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import torch

from isotrain.adapters import keras_private
from isotrain.adapters.torch.parted_reading import GatheredReads
from isotrain.adapters.torch.parted_weights import ShardedWeights
from isotrain.plugin import SpecError


@contextlib.contextmanager
def gather_on_read(weights: ShardedWeights, variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Within it, a Keras model computes with weights that lie in parts.

    Args:
        weights: They.
        variables: Of the model, in the same order.

    Raises:
        SpecError: A layer takes gradients by torch.func.
    """
    reads = GatheredReads(weights)
    with reads.without_saving_weights(), _Reading(reads, variables):
        yield


class _Reading(keras.StatelessScope):
    """Gives weights, and has all else where it is."""

    def __init__(self, reads: GatheredReads, variables: Sequence[keras.Variable]) -> None:
        super().__init__(collect_losses=True)
        self._reads = reads
        self._places = {id(variable): place for place, variable in enumerate(variables)}

    def get_current_value(self, variable: keras.Variable) -> torch.Tensor | None:
        """A weight as it is read in this place; None for any other variable."""
        place = self._places.get(id(variable))
        if place is None:
            return None
        sample = keras_private.autocast_value(variable, self._reads.sample_of(place))
        return self._reads.read(place, sample.dtype)

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
