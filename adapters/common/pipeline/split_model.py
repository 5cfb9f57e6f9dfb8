"""Interfaces of models that are split into pipeline stages; imports no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from isotrain.adapters.common.pipeline.profiler import ProfiledCall


class PipelineChunk(Protocol):
    """The layers between two cuts.

    Attributes:
        input_keys: Keys of the tensors that it needs of earlier chunks, or passes on.
        output_keys: Keys of the tensors that later chunks need of it and earlier ones; empty for the last.
    """

    input_keys: Sequence[Any]
    output_keys: Sequence[Any]

    def __call__(self, tensors: Mapping[Any, Any], training: bool) -> dict[Any, Any]:
        """Computes the outputs of its layers; returns them together with the tensors it was given."""

    def boundary_tensors(self, tensors: Mapping[Any, Any]) -> list[Any]:
        """The tensors to send to later chunks, selected from the computed ones."""


class PipelineModel(Protocol):
    """A model that is split into chunks."""

    @property
    def chunks(self) -> Sequence[Any]:
        """Chunks of the model (`PipelineChunk`), from the inputs on."""

    def inputs(self, given: Any) -> dict[Any, Any]:
        """Tensors of a micro-batch's inputs, by key."""

    def stage_of_weights(self, stages: int) -> dict[int, int]:
        """Stage of each weight, by the weight's identity."""

    def seeds(self, chunk: int) -> Sequence[Any]:
        """Keras variables of a chunk's seed generators, shape `[2]`: seed, and number of draws so far."""

    def layer_calls(self) -> Iterable[ProfiledCall]:
        """Calls of the layers, chunk by chunk in execution order, for profiling; keys are those of chunks."""

    def describe(self, stages: int) -> list[str]:
        """One line per chunk: its stage, its layers, and the tensors that it sends."""


class PipelineLosses(Protocol):
    """Losses of chunks."""

    def of(self, chunk: Any, tensors: Mapping[Any, Any], targets: Any) -> tuple[Any, Any]:
        """Mean loss of a chunk, a scalar; and of the last one, the predictions."""


def no_comparison_needed(given: Any) -> None:
    """Does nothing: what is split is the graph of a portable model, or a sequence of modules itself."""
