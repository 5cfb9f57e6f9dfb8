"""What a process of a run is given to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isotrain.core.plan import Plan
from isotrain.core.spec import TrainingSpec

if TYPE_CHECKING:
    from isotrain.core.session import Session

Work = Callable[["Session"], Any]
"""Called on every process with its session; what it returns is given back to the caller."""


@dataclass(frozen=True)
class Job:
    """One run's work, the same for every process."""

    work: Work
    spec: TrainingSpec
    plan: Plan
