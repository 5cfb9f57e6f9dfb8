"""Models that are computed in stages: what they must be able to do; imports no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from isotrain.adapters.common.pipeline.profiler import ProfiledCall


class PipelineChunk(Protocol):
    """The layers between two cuts.

    Attributes:
        input_keys: What it needs of the chunks before it, or passes on.
        output_keys: What the chunks behind it need of it and those before it; nothing of the last one.
    """

    input_keys: Sequence[Any]
    output_keys: Sequence[Any]

    def __call__(self, known: Mapping[Any, Any], training: bool) -> dict[Any, Any]:
        """Computes all tensors of its layers, beside those that are given."""

    def boundary_tensors(self, known: Mapping[Any, Any]) -> list[Any]:
        """What it gives to those behind it, of all that it knows."""


class PipelineModel(Protocol):
    """A model, cut."""

    @property
    def chunks(self) -> Sequence[Any]:
        """Of it, from the inputs on; see `PipelineChunk`."""

    def inputs(self, given: Any) -> dict[Any, Any]:
        """The tensors of a slice's inputs."""

    def stage_of_weights(self, stages: int) -> dict[int, int]:
        """The stage of each weight, by its identity."""

    def layer_calls(self) -> Iterable[ProfiledCall]:
        """Of its layers, in their order."""

    def describe(self, stages: int) -> list[str]:
        """Of each chunk where it is, its layers, and what it sends: a line each."""


class PipelineLosses(Protocol):
    """The losses of chunks."""

    def of(self, chunk: Any, known: Mapping[Any, Any], targets: Any) -> tuple[Any, Any]:
        """The mean loss of a chunk; and of the last one, the predictions."""


def no_comparison_needed(given: Any) -> None:
    """A portable model computes what its graph says, and that is what is cut."""
