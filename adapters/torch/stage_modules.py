"""A native model that applies modules one after the other, cut into chunks between them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from isotrain.adapters.stage_profile import LayerCall
from isotrain.adapters.stage_rules import MASKED_LOSS, bounds, listed, require_apart
from isotrain.adapters.torch.native_program import NativeProgram
from isotrain.plugin import (
    LayerCost,
    ModelCut,
    ModelProfile,
    Partitioner,
    SpecError,
    UnsupportedError,
)

Modules = Sequence[tuple[str, nn.Module]]
"""With their names in the model."""


class ModuleChunk:
    """Modules of which each takes what the one before gives.

    Attributes:
        takes: The chunk before it, of which it takes what that gives; none of the first.
        gives: Itself; nothing of the last one.
        modules: Of it.
    """

    def __init__(
        self, number: int, modules: Modules, is_last: bool, program: NativeProgram
    ) -> None:
        self.takes = (number,) if number else ()
        self.gives = () if is_last else (number + 1,)
        self.modules = modules
        self._number = number
        self._computed = program.with_autocast(self._compute)

    def __call__(self, known: Mapping[int, torch.Tensor], training: bool) -> dict[int, Any]:
        """Computes what it gives; the model is in training mode."""
        return {**known, self._number + 1: self._computed(known[self._number])}

    def _compute(self, given: Any) -> Any:
        for _, module in self.modules:
            given = module(given)
        return given

    def crossing(self, known: Mapping[int, Any]) -> list[torch.Tensor]:
        """What it gives to the chunk behind it.

        Raises:
            UnsupportedError: That is no tensor.
        """
        found = [known[key] for key in self.gives]
        for each in found:
            if not isinstance(each, torch.Tensor):
                raise UnsupportedError(
                    f"pipeline: the module {self.modules[-1][0]} gives a {type(each).__name__}, and what goes"
                    " over a cut must be one tensor. Cut elsewhere, by the option `cut`."
                )
        return found


class StagedModules:
    """Modules that a model applies one after the other, cut; and its losses.

    Attributes:
        chunks: Of it, from the inputs on.
    """

    def __init__(self, program: NativeProgram, cut: ModelCut) -> None:
        """Cuts a model.

        Raises:
            SpecError: There are no such modules, too few, or they do not have all weights.
            UnsupportedError: It is no sequence of modules, or a module would be on both sides of a cut.
        """
        named = _in_turn(program.model, cut.modules)
        names = [name for name, _ in named]
        if cut.first:
            ends = bounds(names, cut.first, cut.chunks)
        else:
            ends = _balanced(named, cut.chunks)
        parts = [named[a:b] for a, b in itertools.pairwise(ends)]
        require_apart([_variables(part) for part in parts])
        last = len(parts) - 1
        self._program = program
        self._is_compared = type(program.model).forward is nn.Sequential.forward
        self.chunks = [ModuleChunk(n, part, n == last, program) for n, part in enumerate(parts)]

    def inputs(self, given: Any) -> dict[int, torch.Tensor]:
        """The tensor that the first module takes.

        Raises:
            SpecError: There are several.
        """
        if not isinstance(given, torch.Tensor):
            raise SpecError(
                f"data: the inputs are a {type(given).__name__}, and the first module of a pipeline takes"
                " one array."
            )
        return {0: given}

    def compare(self, given: Any) -> None:
        """Looks once, on all weights, whether the modules one after the other compute what the model does.

        Raises:
            SpecError: They do not.
        """
        if self._is_compared:
            return
        self._is_compared = True
        with self._program.evaluating():
            whole, in_turn = self._program.with_autocast(self._both)(given)
        same = isinstance(whole, torch.Tensor) and isinstance(in_turn, torch.Tensor)
        if (
            not same
            or whole.shape != in_turn.shape
            or not torch.allclose(whole, in_turn, equal_nan=True)
        ):
            names = ", ".join(name for chunk in self.chunks for name, _ in chunk.modules)
            raise SpecError(
                f"pipeline: the modules {names}, one after the other, do not compute what the model"
                f" ({type(self._program.model).__name__}) does."
            )

    def _both(self, given: Any) -> tuple[Any, Any]:
        """What the model gives for a slice, and what its modules do."""
        (found,) = self.inputs(given).values()
        for chunk in self.chunks:
            for _, module in chunk.modules:
                found = module(found)
        return self._program.model(given), found

    def homes(self, stages: int) -> dict[int, int]:
        """The stage of each parameter and buffer, by its identity."""
        return {
            identity: number % stages
            for number, chunk in enumerate(self.chunks)
            for _, identity in _variables(chunk.modules)
        }

    def calls(self) -> list[LayerCall]:
        """Of its modules, in their order."""
        placed = [(n, *each) for n, chunk in enumerate(self.chunks) for each in chunk.modules]
        return [
            LayerCall(name, chunk, [place], [place + 1], _computing(module), _trained(module))
            for place, (chunk, name, module) in enumerate(placed)
        ]

    def described(self, stages: int) -> list[str]:
        """Of each chunk where it is, and its modules: a line each."""
        return [
            f"stage {number % stages + 1} of {stages}: {', '.join(name for name, _ in chunk.modules)};"
            f" {sum(_size(module) for _, module in chunk.modules)} trainable numbers"
            for number, chunk in enumerate(self.chunks)
        ]

    def of(
        self, chunk: ModuleChunk, known: Mapping[int, Any], targets: Any
    ) -> tuple[torch.Tensor, Any]:
        """The mean loss of the last chunk, and its predictions; 0 of others.

        Raises:
            UnsupportedError: It counts targets by more than their number.
        """
        if chunk is not self.chunks[-1]:
            return torch.zeros(()), None
        predictions = known[len(self.chunks)]
        found = self._program.loss_of(targets, predictions)
        if found.dim():
            raise UnsupportedError(MASKED_LOSS)
        return found, predictions


def _in_turn(model: nn.Module, patterns: Sequence[str]) -> Modules:
    """The modules that a model applies one after the other.

    Args:
        model: A sequence, or one that names them by a method `pipeline_modules`.
        patterns: Of their names, if the spec has some.

    Raises:
        SpecError: There are none of these names, or weights besides.
        UnsupportedError: Nobody says which they are.
    """
    every = [each for each in model.named_modules(remove_duplicate=False) if each[0]]
    if patterns:
        known = dict(every)
        found = [(name, known[name]) for name in listed([name for name, _ in every], patterns)]
    elif callable(given := getattr(model, "pipeline_modules", None)):
        names = {id(module): name for name, module in reversed(every)}
        found = [(names.get(id(module), type(module).__name__), module) for module in given()]
    elif type(model).forward is nn.Sequential.forward:
        return [(name, module) for name, module in every if "." not in name]
    else:
        raise UnsupportedError(
            f"strategy pipeline: the model is a {type(model).__name__}, whose modules Python calls; a"
            " native model is cut between modules that are applied one after the other. Build it as a"
            " torch.nn.Sequential, give it a method `pipeline_modules` that returns them, or name them by"
            " the strategy's option `modules`."
        )
    held = {identity for _, identity in _variables(found)}
    left = [name for name, each in model.named_parameters() if id(each) not in held]
    if left:
        raise SpecError(
            f"pipeline: the modules {', '.join(name for name, _ in found)} are to be the whole model, and"
            f" {', '.join(left)} is in none of them."
        )
    return found


def _balanced(modules: Modules, chunks: int) -> list[int]:
    """Where chunks begin, and the end of all, by the numbers that each module trains."""
    layers = [
        LayerCost(name, 1.0 + _size(module), 0.0, 1, 0, (place - 1,) if place else ())
        for place, (name, module) in enumerate(modules)
    ]
    stages = Partitioner(ModelProfile(layers), bandwidth=1.0).balanced(chunks).stages
    return [0, *itertools.accumulate(len(stage.layers) for stage in stages)]


def _variables(modules: Modules) -> list[tuple[str, int]]:
    return [
        (name, id(each))
        for name, module in modules
        for each in (*module.parameters(), *module.buffers())
    ]


def _computing(module: nn.Module) -> Any:
    return lambda given: [module(given)]


def _trained(module: nn.Module) -> list[torch.Tensor]:
    return [each for each in module.parameters() if each.requires_grad]


def _size(module: nn.Module) -> int:
    return sum(each.numel() for each in _trained(module))
