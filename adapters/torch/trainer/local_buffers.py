"""Buffers of a native model that each replica keeps for itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.trainer.state import in_place

LOCAL_BUFFERS = "buffers/"
"""Prefix of the execution-state names of buffers that are not synchronised between replicas."""
_MAX_NAMED = 5
"""Maximum number of buffers that a note names."""


class LocalBuffers:
    """Floating-point buffers that are not synchronised between replicas: all but moving statistics.

    Attributes:
        tensors: The buffers by name, any shapes.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the buffers by name, any shapes."""
        self.tensors = dict(tensors)
        self._initial_versions: dict[str, int] = {}

    def mark_start(self) -> None:
        """Marks the present values as those with which training starts."""
        self._initial_versions = {
            name: private_api.version_of(each) for name, each in self.tensors.items()
        }

    def execution_state(self) -> dict[str, torch.Tensor]:
        """Buffers, in their shapes, written since the start, by their names in the execution state."""
        return {
            LOCAL_BUFFERS + name: buffer
            for name, buffer in self.tensors.items()
            if private_api.version_of(buffer) != self._initial_versions.get(name)
        }

    def write(self, name: str, value: torch.Tensor) -> None:
        """Overwrites one buffer, by its name in the execution state; `value` has its shape.

        Raises:
            IsotrainError: There is no such buffer.
        """
        in_place({LOCAL_BUFFERS + name: each for name, each in self.tensors.items()}).write(
            name, value
        )

    def notes(self) -> list[str]:
        """Note for the plan that these buffers are not synchronised between replicas; none without any."""
        if not self.tensors:
            return []
        buffers = list(self.tensors)
        names = ", ".join(buffers[:_MAX_NAMED]) + ", ..." * (len(buffers) > _MAX_NAMED)
        return [
            f"model: {names}: each replica keeps its own value of these buffers; only moving statistics, the"
            " buffers named running_*, are averaged in every step"
        ]


def is_statistic(name: str) -> bool:
    """Whether a buffer is a moving statistic, by torch's naming convention `running_*`."""
    return name.rpartition(".")[2].startswith("running_")
