"""What is alike in torch programs of which each replica keeps a part of every weight and slot."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from isotrain.adapters.torch.exchange import Exchange
from isotrain.adapters.torch.parted_weights import PartedWeights
from isotrain.adapters.torch.program import Program
from isotrain.adapters.torch.state import Section
from isotrain.adapters.torch.tensors import Held
from isotrain.plugin import Mesh, StateKind


class PartedProgram(Program):
    """Computes with weights that are joined as they are read.

    Attributes:
        weights: They, once they are taken apart.
    """

    weights: PartedWeights | None = None

    @property
    def parted(self) -> PartedWeights:
        """The weights in parts."""
        assert self.weights is not None, "they were taken apart at the start"
        return self.weights

    @abstractmethod
    def take_apart(self, exchange: Exchange, mesh: Mesh, unit_bytes: int) -> None:
        """Keeps the own part of each weight from now on, and slots for it alone.

        Args:
            exchange: Ties this replica to the others, which have the same weights.
            mesh: How parts lie over the replicas.
            unit_bytes: Of weights that are joined together, but for layers that have more.

        Raises:
            SpecError: The model has weights that cannot be.
        """

    @abstractmethod
    def _joining(self, weights: PartedWeights) -> AbstractContextManager[None]:
        """Within it, a forward pass reads weights that lie in parts."""

    @abstractmethod
    def _slots_here(self) -> dict[str, Held]:
        """What this replica has of the optimizer's slots, by name."""

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Within it is one forward pass, wherever its weights are."""
        if self.weights is None or self.weights.is_whole:
            yield
            return
        self.weights.forget()
        with self._joining(self.weights):
            yield
        self.weights.end_forward()

    def sections(self) -> dict[StateKind, Section]:
        """The state that it has itself: its parts of weights and slots; all weights, while they are here."""
        return super().sections() | {
            "trainable": Section(self._weights_here, self._write_weight),
            "optimizer": Section(self._slots_here, self.write_optimizer_slot),
        }

    def _weights_here(self) -> dict[str, Held]:
        return {**self.trainable} if self.weights is None else self.weights.here()

    def _write_weight(self, name: str, value: torch.Tensor) -> None:
        self.parted.write(name, value)
