"""What a strategy keeps from step to step, as it is taken from one run and given to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StrategyState:
    """What a strategy keeps besides the state of its replicas.

    Attributes:
        values: JSON values, equal on every process.
        tensors: Arrays by name, equal on every process.
        per_replica: Arrays by name of each replica of this process, by its index in the run.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Arrays = field(default_factory=dict)
    per_replica: Mapping[int, Arrays] = field(default_factory=dict)
