"""Settings of the worker processes that make the samples of a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Number of worker processes, and how they start.

    Attributes:
        count: Number of processes for each data set; 0: this process makes each local batch when it is due.
        prefetch: Number of local batches that each process makes ahead.
        start: Whether they are new interpreters, or forks of this process.
        initialize: Function of a worker's index, called in each before its first sample; None for none.
        imports: Modules that each imports before its first sample.
        timeout: Seconds without an answer after which a worker counts as lost.
    """

    count: int
    prefetch: int = 2
    start: Literal["spawn", "fork"] = "spawn"
    initialize: Callable[[int], Any] | None = None
    imports: tuple[str, ...] = ()
    timeout: float = 300.0
