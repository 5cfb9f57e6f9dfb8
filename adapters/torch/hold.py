"""Copies of weights and slots that are made while a step computes its gradients, and what waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from isotrain.adapters.torch import private
from isotrain.plugin import IsotrainError

T = TypeVar("T")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Hold:
    """Holds up whoever would change what is being copied.

    A forward pass must leave it alone too. Whether it does is seen in the first one after a copy, which is
    therefore made at once, as all are if it does not; and of each later copy by torch's count of changes.
    """

    def __init__(self) -> None:
        self._copies = 0
        self._changed = threading.Condition()
        self._watched: tuple[Sequence[torch.Tensor], list[int]] | None = None
        self._may_be_beside: bool | None = None

    def until(self, tensors: Sequence[torch.Tensor], copy: Callable[[], T]) -> Callable[[], T]:
        """Holds tensors from now on, until what this gives was called and has returned what `copy` does."""
        if not (tensors and self._may_be_beside):
            copied = copy()
            if tensors and self._may_be_beside is None:
                self._watched = tensors, _fingerprints(tensors)
            return lambda: copied
        with self._changed:
            self._copies += 1
        before = [private.changes_of(tensor) for tensor in tensors]

        def released() -> T:
            try:
                copied = copy()
                self._require_unchanged(tensors, before)
                return copied
            finally:
                with self._changed:
                    self._copies -= 1
                    self._changed.notify_all()

        return released

    def _require_unchanged(self, tensors: Sequence[torch.Tensor], before: Sequence[int]) -> None:
        if before != [private.changes_of(tensor) for tensor in tensors]:
            self._may_be_beside = False
            raise IsotrainError(
                "the model's forward pass changed its own weights while they were copied, so that the copy"
                " is of no step. The next ones are made before the next step begins."
            )

    def wait_after_forward(self) -> None:
        """As `wait`, in a step whose forward passes are over, before it updates."""
        if self._watched is not None:
            tensors, before = self._watched
            self._watched = None
            self._may_be_beside = before == _fingerprints(tensors)
        self.wait()

    def wait(self) -> None:
        """Returns once nothing is being copied."""
        if self._copies:
            with self._changed:
                self._changed.wait_for(lambda: not self._copies)


def _fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The sum of the bits of each; it changes with any value, however that was set."""
    return [int(_bits(tensor.detach()).sum(dtype=torch.int64)) for tensor in tensors]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_WORDS.get(tensor.element_size(), torch.int64))
