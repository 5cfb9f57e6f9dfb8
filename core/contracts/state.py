"""The state of a replica: its kinds, and what is known of a named part of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

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
        part: The shape of that part; None likewise.
        aliases: Other names that the model has for it, where weights are tied.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    offset: tuple[int, ...] | None = None
    part: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()

    def on_this_replica_only(self) -> StateInfo:
        """That it is whole here, and elsewhere not at all."""
        return replace(self, offset=(0,) * len(self.shape), part=self.shape)

    @property
    def whole_bytes(self) -> int:
        """That the whole of it takes."""
        if self.part in (None, self.shape):
            return self.nbytes
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits[0]) // 8 if bits else 1)

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)
