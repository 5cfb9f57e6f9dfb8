"""The state of a replica: its kinds, and what is known of a named part of it."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

ExportForm = Literal["keras", "keras-weights", "torch", "safetensors", "onnx", "saved-model"]
"""`keras`: a Keras model. `keras-weights`: its weights. `torch`: a `state_dict`. `safetensors`: weights by
name. `onnx`: the computation of predictions, for ONNX. `saved-model`: the same for TensorFlow, a folder."""
FORMS: tuple[ExportForm, ...] = get_args(ExportForm)
SUFFIXES: Mapping[ExportForm, tuple[str, ...]] = {
    "keras": (".keras",),
    "keras-weights": (".weights.h5",),
    "torch": (".pt", ".pth"),
    "safetensors": (".safetensors",),
    "onnx": (".onnx",),
    "saved-model": (),
}
"""How the names of files of each form end; a folder's name is free."""


class OptimizerStateNames(ABC):
    """Names in the state of native models, which lack the prefix `optimizer/`; imports no framework.

    A slot has its name in the spec (`optimizer.slots`), where `momentum` of SGD and RMSprop is what was
    subtracted from a weight the last time, that of SGD with the other sign: the rate is in it.
    """

    @abstractmethod
    def slot(self, optimizer: str, weight: str, slot: str) -> Sequence[str]:
        """Says what a weight's slot may be called, the likeliest first; nothing where there is none.

        Args:
            optimizer: Its name in the spec.
            weight: Its name in the state.
            slot: Its name in the spec.
        """

    @abstractmethod
    def steps(self, optimizer: str, weight: str) -> str | None:
        """The name of the number of updates of a weight, if it counts."""

    def rate_factor(self, optimizer: str, slot: str) -> float | None:
        """What a slot, times the rate, is to be multiplied by to be the spec's; None: it is the spec's."""
        return None


@dataclass(frozen=True)
class StateBytes:
    """Of one replica, in bytes.

    Attributes:
        weights: Trainable and others.
        gradients: Of a step, where they take most.
        slots: Of the optimizer.
    """

    weights: int
    gradients: int
    slots: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.slots


@dataclass(frozen=True)
class ModelBytes:
    """Of all that a model and its training have, in bytes.

    Attributes:
        weights: Of each trainable weight, in order.
        fixed: Of the other weights together.
        slots: How many slots of a weight's size the optimizer has for each.
    """

    weights: tuple[int, ...]
    fixed: int = 0
    slots: int = 0

    @property
    def replicated(self) -> StateBytes:
        """What a replica has that has all of it."""
        trained = sum(self.weights)
        return StateBytes(trained + self.fixed, trained, trained * self.slots)


StateKind = Literal[
    "trainable",
    "non-trainable",
    "optimizer",
    "loss-scale",
    "random",
    "metrics",
    "exchange",
    "carry",
]
"""`trainable` and `non-trainable`: the model's weights, under their own names; all else under `KIND/...`.

`optimizer`: its slots. `loss-scale`: `scale`, and `steps` since it changed. `random`: generators of random
numbers, but for those among the non-trainable weights. `metrics`: what training metrics have added up since
they were collected last. `exchange`: what the backend keeps of how it exchanges and computes, such as
residuals of compressed gradients. `carry`: what layers carry from one call to the next and is no weight, such
as the states of stateful RNNs.

`random`, `metrics`, `exchange` and `carry` are each replica's own. The others are equal on all replicas
wherever these hold the same weights."""

ALL_STATE: tuple[StateKind, ...] = get_args(StateKind)
MODEL_STATE: tuple[StateKind, ...] = ("trainable", "non-trainable", "optimizer")
"""What is meant where no kinds are given."""


@dataclass(frozen=True)
class StateInfo:
    """What is known of a named state without reading it.

    Attributes:
        shape: Of the whole of it.
        dtype: Its own, by name: also `bfloat16`, for which `read_state` gives float32, as NumPy lacks it.
        nbytes: Bytes that it takes on this replica.
        offset: Where this replica's part begins in the whole, an index along each axis; None where every
            replica has all of it. What is whole here, and elsewhere not at all, is a part too.
        shard_shape: Shape of this replica's shard; None likewise.
        aliases: Other names that the model has for it, where weights are tied.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    offset: tuple[int, ...] | None = None
    shard_shape: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()

    def on_this_replica_only(self) -> StateInfo:
        """That it is whole here, and elsewhere not at all."""
        return replace(self, offset=(0,) * len(self.shape), shard_shape=self.shape)

    @property
    def full_nbytes(self) -> int:
        """That the whole of it takes."""
        if self.shard_shape in (None, self.shape):
            return self.nbytes
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits[0]) // 8 if bits else 1)

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)
