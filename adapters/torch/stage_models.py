"""Models that torch computes in stages: what they must be able to do, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from isotrain.adapters.stage_profile import LayerCall
from isotrain.adapters.torch.native_program import NativeProgram
from isotrain.adapters.torch.program import Program
from isotrain.plugin import ModelCut, TrainingSpec


class StageChunk(Protocol):
    """The layers between two cuts.

    Attributes:
        takes: What it needs of the chunks before it, or passes on.
        gives: What the chunks behind it need of it and those before it; nothing of the last one.
    """

    takes: Sequence[Any]
    gives: Sequence[Any]

    def __call__(self, known: Mapping[Any, torch.Tensor], training: bool) -> dict[Any, Any]:
        """Computes all tensors of its layers, beside those that are given."""

    def crossing(self, known: Mapping[Any, Any]) -> list[torch.Tensor]:
        """What it gives to those behind it, of all that it knows."""


class StageModel(Protocol):
    """A model, cut."""

    @property
    def chunks(self) -> Sequence[Any]:
        """Of it, from the inputs on; see `StageChunk`."""

    def inputs(self, given: Any) -> dict[Any, torch.Tensor]:
        """The tensors of a slice's inputs."""

    def homes(self, stages: int) -> dict[int, int]:
        """The stage of each weight, by its identity."""

    def calls(self) -> Iterable[LayerCall]:
        """Of its layers, in their order."""

    def described(self, stages: int) -> list[str]:
        """Of each chunk where it is, its layers, and what it sends: a line each."""


class StageLosses(Protocol):
    """The losses of chunks."""

    def of(self, chunk: Any, known: Mapping[Any, Any], targets: Any) -> tuple[torch.Tensor, Any]:
        """The mean loss of a chunk; and of the last one, the predictions."""


def cut_model(
    program: Program, spec: TrainingSpec, cut: ModelCut
) -> tuple[StageModel, StageLosses, Callable[[Any], None]]:
    """Cuts the model of a program.

    Returns:
        It, its losses, and what is told the inputs of a slice while all weights are here: it refuses a model
        that does not compute what its chunks do.

    Raises:
        SpecError: It cannot be cut so.
        UnsupportedError: It cannot be cut, or a layer would be on both sides of a cut.
    """
    if isinstance(program, NativeProgram):
        from isotrain.adapters.torch.stage_modules import StagedModules

        modules = StagedModules(program, cut)
        return modules, modules, modules.compare
    from isotrain.adapters.keras_stages import StagedModel, StageLoss
    from isotrain.adapters.torch.keras_program import KerasProgram

    assert isinstance(program, KerasProgram), "a program is of one kind or the other"
    model = StagedModel(program.model, cut.chunks, cut.first)
    return model, StageLoss(spec, model, program.losses["train"]), _by_its_graph


def _by_its_graph(given: Any) -> None:
    """A portable model computes what its graph says, and that is what is cut."""
