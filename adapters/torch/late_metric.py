"""Metrics that make their sums by the first samples they see."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from isotrain.adapters.torch.metrics import Metric


class LazyMetric(Metric):
    """Keeps what is written of its sums until they are made."""

    def __init__(self) -> None:
        self._pending: dict[str, Tensor] = {}

    @property
    @abstractmethod
    def is_unbuilt(self) -> bool: ...

    def named_sums(self) -> dict[str, Tensor]:
        return self._pending or super().named_sums()

    def write_sum(self, name: str, value: Tensor) -> None:
        """Sets one of them; it is kept until it is made, if that is yet to come."""
        if self.is_unbuilt:
            self._pending[name] = value
        else:
            super().write_sum(name, value)

    def write_pending(self) -> None:
        """Sets what was kept, once the sums are made."""
        pending, self._pending = self._pending, {}
        for name, value in pending.items():
            super().write_sum(name, value)

    def reset(self) -> None:
        self._pending = {}
        super().reset()
