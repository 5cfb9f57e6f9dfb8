"""Guard for snapshots of weights and optimizer state, copied while the next step computes gradients."""

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
    """Makes updates wait until a concurrent copy of the tensors is done.

    A forward pass must not change these tensors either. To verify that, the first copy is made at once and
    compared with the tensors after the next forward pass. If they differ, all copies are made at once; if
    not, later copies run concurrently and are checked by torch's version counters, which miss changes through
    `Tensor.data`.
    """

    def __init__(self) -> None:
        self._copies = 0
        self._done = threading.Condition()
        self._watched: tuple[Mapping[str, torch.Tensor], Arrays] | None = None
        self._is_concurrent: bool | None = None

    def hold_for(
        self, tensors: Mapping[str, torch.Tensor], copy: Callable[[], Arrays]
    ) -> Callable[[], Arrays]:
        """Starts a snapshot: updates wait until the returned function has copied the tensors. Local.

        Args:
            tensors: Detached tensors by name, any shape.
            copy: Function that copies them, under the same names.

        Returns:
            Function that makes the copy, for a background thread; must be called exactly once.
        """
        if not (tensors and self._is_concurrent):
            copied = copy()
            if tensors and self._is_concurrent is None:
                self._watched = tensors, copied
            return lambda: copied
        with self._done:
            self._copies += 1
        versions = _versions(tensors)

        def copy_and_release() -> Arrays:
            try:
                copied = copy()
                self._require_unchanged(tensors, versions)
                return copied
            finally:
                with self._done:
                    self._copies -= 1
                    self._done.notify_all()

        return copy_and_release

    def _require_unchanged(self, tensors: Mapping[str, torch.Tensor], versions: list[int]) -> None:
        """Refuses a copy if named tensors, of any shape, were changed in place while it was made."""
        if versions != _versions(tensors):
            self._is_concurrent = False
            raise IsotrainError(
                "the model's forward pass changed its own weights while they were copied, so that the copy"
                " belongs to no step. Further copies are made before the next step begins."
            )

    def wait_after_forward(self) -> None:
        """Waits as `wait`, between forward passes and update of a step; compares the first copy."""
        if self._watched is not None:
            tensors, copied = self._watched
            self._watched = None
            self._is_concurrent = all(
                _same_bits(to_numpy(tensor), copied[name]) for name, tensor in tensors.items()
            )
        self.wait()

    def release(self) -> None:
        """Waits as `wait`, before the tensors are replaced; the comparison of the first copy is dropped."""
        self._watched = None
        self.wait()

    def wait(self) -> None:
        """Waits until no copy is running. Local."""
        if self._copies:
            with self._done:
                self._done.wait_for(lambda: not self._copies)


def _versions(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Version counters of named tensors, any shapes."""
    return [private_api.version_of(tensor) for tensor in tensors.values()]


def _same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Bitwise equality of two arrays, any shape; NaN equals itself."""
    return np.array_equal(left.view(np.uint8), right.view(np.uint8))
