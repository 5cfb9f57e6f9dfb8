"""The contract of what records a program that is not isotrain's, as a framework's hooks see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

Prints = dict[str, list[Any]]
"""Fingerprints as lists, by name."""


class ProgramRecorder(Protocol):
    """Receives what a process of a program does; an adapter's `program_hooks` call it.

    Attributes:
        is_recording: Whether events are recorded: some optimizer's steps are still wanted.
    """

    is_recording: bool

    def wants(self, optimizer: int) -> bool:
        """Whether the next step of an optimizer is to be recorded."""

    def of_another_replica(self) -> ProgramRecorder:
        """A recorder of another replica of this process."""

    def set_rank(self, rank: int, processes: int) -> None:
        """Tells the process's rank and the number of processes. Called before the first step."""

    def event(self, kind: str, **facts: Any) -> None:
        """Notes something that happens before the next step of an optimizer, with JSON values."""

    def rows(self, arrays: list[np.ndarray], *, channels_last: bool = False) -> list[int]:
        """A hash of each sample of a batch: of the rows of all arrays, shapes `[samples, ...]`.

        Args:
            arrays: The batch.
            channels_last: Whether the channels of images and videos are the last axis, not the second.
        """

    def fingerprints(self, arrays: Mapping[str, np.ndarray]) -> Prints:
        """Fingerprints of arrays of any shapes."""

    def start(
        self, weights: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        """Facts of the first step of an optimizer: weights before it, shapes. Called after `set_rank`.

        Args:
            weights: Weights that the optimizer trains, by name.
            state: Buffers of the models, such as moving statistics, by name.
        """

    def step(self, optimizer: int, facts: Mapping[str, Any]) -> None:
        """Writes a step of an optimizer, with the events before it.

        Args:
            optimizer: Index of the optimizer, in the order of first steps.
            facts: Fields of `program_trace.reading.Step`.
        """
