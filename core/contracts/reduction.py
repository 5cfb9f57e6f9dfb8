"""How the gradients of a step are taken over, bucket by bucket."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from isotrain.core.contracts.replica import Computation


@dataclass(frozen=True)
class Reduction:
    """What a strategy makes of the gradients of a step, in parts; the same on every process.

    Attributes:
        buckets: Of each, the places of its weights among the trainable ones: each weight is in one of them.
        statics: Of each bucket, what `reduce` is given besides.
        reduce: `reduce(replica, gradients, static=...)` gives a list of tensors, which are kept.
        each_slice: Whether it is called for the gradients of each slice, and what it gives is added up over
            the slices of a step; or once, for the sums of the gradients.
    """

    buckets: tuple[tuple[int, ...], ...]
    statics: tuple[Hashable, ...]
    reduce: Computation
    each_slice: bool = False
