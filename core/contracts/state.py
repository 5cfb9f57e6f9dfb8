"""The state of a replica: kinds, names, shapes, shards and sizes of its tensors; export formats."""

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
"""File name suffixes of each format; folders may have any name."""


class OptimizerStateNames(ABC):
    """Optimizer state names of a framework's native models, without `optimizer/`; imports no framework.

    Slots are named as in the spec (`optimizer.slots`). There, `momentum` of RMSprop is the last update, which
    was subtracted from the weight, and that of SGD the same with opposite sign: both include the learning
    rate.
    """

    @abstractmethod
    def slot(self, optimizer: str, weight: str, slot: str) -> Sequence[str]:
        """Possible state names of a weight's optimizer slot, the likeliest first; empty for none.

        Args:
            optimizer: Name of the optimizer in the spec.
            weight: Name of the weight in the state.
            slot: Name of the slot in the spec.
        """

    @abstractmethod
    def steps(self, optimizer: str, weight: str) -> str | None:
        """State name of a weight's step count; None if the optimizer keeps none."""

    def rate_factor(self, optimizer: str, slot: str) -> float | None:
        """Factor that, times the learning rate, converts a slot to the spec's; None if they are equal."""
        return None


@dataclass(frozen=True)
class StateBytes:
    """Memory of one replica's state, in bytes.

    Attributes:
        weights: Bytes of all weights, trainable or not.
        gradients: Largest number of bytes of gradients during a step.
        slots: Bytes of optimizer state.
    """

    weights: int
    gradients: int
    slots: int

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.weights + self.gradients + self.slots


@dataclass(frozen=True)
class ModelBytes:
    """Unsharded size of a model's state.

    Attributes:
        weights: Bytes of each trainable weight, in order.
        fixed: Bytes of the other weights together.
        slots: Number of optimizer slots of a weight's size per trainable weight.
        local: Bytes of the trainable weights that one process has before its strategy starts; None: of all.
    """

    weights: tuple[int, ...]
    fixed: int = 0
    slots: int = 0
    local: int | None = None

    @property
    def replicated(self) -> StateBytes:
        """State of a replica that holds all of it."""
        trained = sum(self.weights)
        return StateBytes(trained + self.fixed, trained, trained * self.slots)


StateKind = Literal[
    "trainable",
    "non-trainable",
    "optimizer",
    "loss-scale",
    "random",
    "metrics",
    "execution",
    "carry",
]
"""`trainable` and `non-trainable`: the model's weights, under their own names; all else under `KIND/...`.

`optimizer`: slots and step counts. `loss-scale`: `scale`, and `steps` since it changed. `random`: random
number generators that are not among the non-trainable weights. `metrics`: accumulators of training metrics
since they were last collected. `execution`: execution state, what the backend keeps for communication and
computation, such as residuals of compressed gradients. `carry`: what layers carry from one call to the next,
such as the states of stateful RNNs (Flax's word for it); weights that the spec's `per_replica` names are also
here.

`random`, `metrics`, `execution` and `carry` differ between replicas. The others are equal on all replicas
that hold the same weights."""

ALL_STATE: tuple[StateKind, ...] = get_args(StateKind)
MODEL_STATE: tuple[StateKind, ...] = ("trainable", "non-trainable", "optimizer")
"""Default kinds: weights and optimizer state."""


@dataclass(frozen=True)
class StateInfo:
    """Shape, dtype and shard of a named tensor.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Name of its dtype; for `bfloat16`, which NumPy lacks, `read_state` returns float32.
        nbytes: Bytes on this replica.
        offset: Index of the shard's first element along each axis of the full tensor; None where every
            replica holds the full tensor. A tensor that one replica alone holds is sharded too.
        shard_shape: Shape of this replica's shard; None likewise.
        aliases: Other names of the tensor, for tied weights.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    offset: tuple[int, ...] | None = None
    shard_shape: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()

    def on_this_replica_only(self) -> StateInfo:
        """Info of a tensor that this replica alone holds, in full."""
        return replace(self, offset=(0,) * len(self.shape), shard_shape=self.shape)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full tensor."""
        if self.shard_shape in (None, self.shape):
            return self.nbytes
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits[0]) // 8 if bits else 1)

    @property
    def size(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)
