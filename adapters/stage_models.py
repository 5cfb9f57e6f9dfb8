"""Models that are computed in stages: what they must be able to do; imports no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from isotrain.adapters.stage_profile import LayerCall


class StageChunk(Protocol):
    """The layers between two cuts.

    Attributes:
        takes: What it needs of the chunks before it, or passes on.
        gives: What the chunks behind it need of it and those before it; nothing of the last one.
    """

    takes: Sequence[Any]
    gives: Sequence[Any]

    def __call__(self, known: Mapping[Any, Any], training: bool) -> dict[Any, Any]:
        """Computes all tensors of its layers, beside those that are given."""

    def crossing(self, known: Mapping[Any, Any]) -> list[Any]:
        """What it gives to those behind it, of all that it knows."""


class StageModel(Protocol):
    """A model, cut."""

    @property
    def chunks(self) -> Sequence[Any]:
        """Of it, from the inputs on; see `StageChunk`."""

    def inputs(self, given: Any) -> dict[Any, Any]:
        """The tensors of a slice's inputs."""

    def homes(self, stages: int) -> dict[int, int]:
        """The stage of each weight, by its identity."""

    def calls(self) -> Iterable[LayerCall]:
        """Of its layers, in their order."""

    def described(self, stages: int) -> list[str]:
        """Of each chunk where it is, its layers, and what it sends: a line each."""


class StageLosses(Protocol):
    """The losses of chunks."""

    def of(self, chunk: Any, known: Mapping[Any, Any], targets: Any) -> tuple[Any, Any]:
        """The mean loss of a chunk; and of the last one, the predictions."""


def by_its_graph(given: Any) -> None:
    """A portable model computes what its graph says, and that is what is cut."""
