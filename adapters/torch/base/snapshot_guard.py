"""Copies of weights and slots that are made while a step computes its gradients, and what waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.tensors import to_numpy
from isotrain.plugin import IsotrainError

Arrays = Mapping[str, np.ndarray]


class SnapshotGuard:
    """Holds up whoever would change what is being copied.

    A forward pass must leave it alone too. Whether it does is seen in the first one after a copy, which is
    therefore made at once, as all are if it does not; and of each later copy by torch's count of changes,
    which lacks those by way of `Tensor.data`.
    """

    def __init__(self) -> None:
        self._copies = 0
        self._changed = threading.Condition()
        self._watched: tuple[Mapping[str, torch.Tensor], Arrays] | None = None
        self._may_be_beside: bool | None = None

    def hold_for(
        self, tensors: Mapping[str, torch.Tensor], copy: Callable[[], Arrays]
    ) -> Callable[[], Arrays]:
        """Holds tensors from now on, until what this gives was called and has returned what `copy` does.

        Args:
            tensors: Detached, so that they keep their memory whatever their owner is given.
            copy: Copies them, under the same names.
        """
        if not (tensors and self._may_be_beside):
            copied = copy()
            if tensors and self._may_be_beside is None:
                self._watched = tensors, copied
            return lambda: copied
        with self._changed:
            self._copies += 1
        before = _changes(tensors)

        def released() -> Arrays:
            try:
                copied = copy()
                self._require_unchanged(tensors, before)
                return copied
            finally:
                with self._changed:
                    self._copies -= 1
                    self._changed.notify_all()

        return released

    def _require_unchanged(self, tensors: Mapping[str, torch.Tensor], before: list[int]) -> None:
        if before != _changes(tensors):
            self._may_be_beside = False
            raise IsotrainError(
                "the model's forward pass changed its own weights while they were copied, so that the copy"
                " is of no step. The next ones are made before the next step begins."
            )

    def wait_after_forward(self) -> None:
        """As `wait`, in a step whose forward passes are over, before it updates."""
        if self._watched is not None:
            tensors, copied = self._watched
            self._watched = None
            self._may_be_beside = all(
                _same_bits(to_numpy(tensor), copied[name]) for name, tensor in tensors.items()
            )
        self.wait()

    def release(self) -> None:
        """As `wait`, before what was copied goes: the next copy is as the first."""
        self._watched = None
        self.wait()

    def wait(self) -> None:
        """Returns once nothing is being copied."""
        if self._copies:
            with self._changed:
                self._changed.wait_for(lambda: not self._copies)


def _changes(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    return [private_api.version_of(tensor) for tensor in tensors.values()]


def _same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Also of what is no number."""
    return np.array_equal(left.view(np.uint8), right.view(np.uint8))
