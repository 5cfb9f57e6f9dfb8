"""A native model that calls modules one after the other, split between them; imports no framework."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from isotrain.adapters.common.pipeline.checks import (
    chunk_bounds,
    matching_names,
    require_no_shared_weights,
)
from isotrain.adapters.common.pipeline.profiler import ProfiledCall
from isotrain.adapters.common.pipeline.split_model import no_comparison_needed
from isotrain.plugin import (
    LayerCost,
    ModelProfile,
    Partitioner,
    PipelineSplit,
    SpecError,
    UnsupportedError,
)

Modules = Sequence[tuple[str, Any]]
"""Modules with their names in the model."""
Call = Callable[..., Any]
"""`call(tensor, training=...)`: calls modules one after the other on a tensor."""


class SequentialChunk:
    """Consecutive modules, each of which takes the previous one's output.

    Attributes:
        input_keys: Key of the previous chunk's output; empty for the first chunk.
        output_keys: Key of its own output; empty for the last chunk.
        modules: Names and modules of the chunk.
    """

    def __init__(
        self,
        number: int,
        modules: Modules,
        is_last: bool,
        call: Call,
        is_tensor: Callable[[Any], bool],
    ) -> None:
        self.input_keys = (number,) if number else ()
        self.output_keys = () if is_last else (number + 1,)
        self.modules = modules
        self._number = number
        self._call = call
        self._is_tensor = is_tensor

    def __call__(self, tensors: Mapping[int, Any], training: bool) -> dict[int, Any]:
        """Computes the output of its modules."""
        return {**tensors, self._number + 1: self._call(tensors[self._number], training=training)}

    def boundary_tensors(self, tensors: Mapping[int, Any]) -> list[Any]:
        """Tensors to send to the next chunk.

        Raises:
            UnsupportedError: The output is not a tensor.
        """
        outputs = [tensors[key] for key in self.output_keys]
        for tensor in outputs:
            if not self._is_tensor(tensor):
                raise UnsupportedError(
                    f"pipeline: the module {self.modules[-1][0]} returns a {type(tensor).__name__}; expected"
                    " one tensor, which can be sent over a cut. Cut elsewhere, by the option `cut`."
                )
        return outputs


class SequentialModel(ABC):
    """Modules that a model calls one after the other, split into chunks.

    Attributes:
        model: The model.
        chunks: Chunks of the model, from the inputs on.
        check_equivalence: Function of a micro-batch's inputs, to be called while all weights are here. At the
            first call it raises a SpecError if the modules do not compute what the model does.
            `no_comparison_needed` for a model that is nothing but a sequence of them.
    """

    sequential_class: str
    """Class of a model that says itself which modules it calls, for messages."""

    def __init__(self, model: Any, cut: PipelineSplit) -> None:
        """Splits a model.

        Args:
            model: The model.
            cut: Number of chunks, and where they begin.

        Raises:
            SpecError: There are no such modules, too few, or they do not have all weights.
            UnsupportedError: The model is no sequence of modules, or a module is on both sides of a cut.
        """
        self.model = model
        named = self._modules_in_sequence(cut.modules)
        self._is_compared = False
        self.check_equivalence: Callable[[Any], None] = (
            no_comparison_needed if named == self._sequence() else self._compare_once
        )
        names = [name for name, _ in named]
        if cut.first_layers:
            bounds = chunk_bounds(names, cut.first_layers, cut.chunks)
        else:
            bounds = self._balanced(named, cut.chunks)
        parts = [named[start:end] for start, end in itertools.pairwise(bounds)]
        require_no_shared_weights([self._variables_of(part) for part in parts])
        last = len(parts) - 1
        self.chunks = [self._chunk(index, part, index == last) for index, part in enumerate(parts)]

    @abstractmethod
    def _submodules(self) -> Modules:
        """All submodules of the model, at any depth; one with several names under each."""

    def _sequence(self) -> Modules | None:
        """Modules of a model that is nothing but a sequence of them; None for other models."""
        return None

    @abstractmethod
    def _weights(self) -> Iterable[tuple[str, Any]]:
        """Named weights of any shape, all of which the modules must have."""

    @abstractmethod
    def _variables(self, module: Any) -> Iterable[Any]:
        """Variables of a module, any shape, that must all be on one stage."""

    @abstractmethod
    def _trained(self, module: Any) -> Sequence[Any]:
        """Trainable weights of a module, any shape."""

    @abstractmethod
    def _call_of(self, modules: Modules) -> Call:
        """A function that calls the modules one after the other."""

    @abstractmethod
    def _is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor of the framework."""

    def _chunk(self, number: int, modules: Modules, is_last: bool) -> Any:
        """A chunk of these modules."""
        return SequentialChunk(number, modules, is_last, self._call_of(modules), self._is_tensor)

    @abstractmethod
    def _is_equivalent(self, inputs: Any) -> bool:
        """Whether model and modules compute the same for a micro-batch's inputs."""

    def inputs(self, inputs: Any) -> dict[int, Any]:
        """The input tensor of the first module, under the key 0.

        Raises:
            SpecError: There are several inputs.
        """
        if not self._is_tensor(inputs):
            raise SpecError(
                f"data: the inputs are a {type(inputs).__name__}, and the first module of a pipeline takes"
                " one array."
            )
        return {0: inputs}

    def _compare_once(self, inputs: Any) -> None:
        """Checks once, with all weights, that the modules in sequence compute what the model does.

        Raises:
            SpecError: They do not.
        """
        if self._is_compared:
            return
        self._is_compared = True
        if not self._is_equivalent(inputs):
            names = ", ".join(name for chunk in self.chunks for name, _ in chunk.modules)
            raise SpecError(
                f"pipeline: the modules {names}, one after the other, do not compute what the model"
                f" ({type(self.model).__name__}) does."
            )

    def run_sequentially(self, inputs: Any) -> Any:
        """Output of the modules in sequence for a micro-batch's inputs, in evaluation mode."""
        tensors = self.inputs(inputs)
        for chunk in self.chunks:
            tensors = chunk(tensors, training=False)
        return tensors[len(self.chunks)]

    def stage_of_weights(self, stages: int) -> dict[int, int]:
        """Stage of each weight, by the weight's identity."""
        return {
            identity: number % stages
            for number, chunk in enumerate(self.chunks)
            for _, identity in self._variables_of(chunk.modules)
        }

    def seeds(self, chunk: int) -> Sequence[Any]:
        """Keras variables of the seed generators of a chunk, shape `[2]`; none by default."""
        return ()

    def layer_calls(self) -> list[ProfiledCall]:
        """Calls of the modules, in order, for profiling."""
        return [
            ProfiledCall(
                module[0],
                number,
                [(number, index) if index else number],
                [number + 1 if index + 1 == len(chunk.modules) else (number, index + 1)],
                _computing(self._call_of([module])),
                self._trained(module[1]),
            )
            for number, chunk in enumerate(self.chunks)
            for index, module in enumerate(chunk.modules)
        ]

    def describe(self, stages: int) -> list[str]:
        """One line per chunk: its stage, its modules and their number of trainable parameters."""
        return [
            f"stage {number % stages + 1} of {stages}: {', '.join(name for name, _ in chunk.modules)};"
            f" {sum(self._size(module) for _, module in chunk.modules)} trainable parameters"
            for number, chunk in enumerate(self.chunks)
        ]

    def _modules_in_sequence(self, patterns: Sequence[str]) -> Modules:
        """The modules that the model calls one after the other.

        Args:
            patterns: Patterns of their names; empty if the spec gives none.

        Raises:
            SpecError: No module matches, or the modules do not have all weights.
            UnsupportedError: Neither the spec nor the model names the modules.
        """
        submodules = self._submodules()
        if patterns:
            by_name = dict(submodules)
            modules = [
                (name, by_name[name])
                for name in matching_names([name for name, _ in submodules], patterns)
            ]
        elif callable(pipeline_modules := getattr(self.model, "pipeline_modules", None)):
            names = {id(module): name for name, module in reversed(submodules)}
            modules = [
                (names.get(id(module), _name_of(module)), module) for module in pipeline_modules()
            ]
        elif (children := self._sequence()) is not None:
            return children
        else:
            raise UnsupportedError(
                f"strategy pipeline: the model is a {type(self.model).__name__}, which calls its modules in"
                " Python code; a native model is split between modules that it calls one after the other."
                f" Build it as {self.sequential_class}, give it a method `pipeline_modules` that returns"
                " them, or name them by the strategy's option `modules`."
            )
        covered = {identity for _, identity in self._variables_of(modules)}
        missing = [name for name, weight in self._weights() if id(weight) not in covered]
        if missing:
            raise SpecError(
                f"pipeline: the modules {', '.join(name for name, _ in modules)} must have all weights of the"
                f" model, and {', '.join(missing)} is in none of them."
            )
        return modules

    def _balanced(self, modules: Modules, chunks: int) -> list[int]:
        """Bounds of chunks with similar numbers of trainable parameters."""
        layers = [
            LayerCost(name, 1.0 + self._size(module), 0.0, 1, 0, (index - 1,) if index else ())
            for index, (name, module) in enumerate(modules)
        ]
        stages = Partitioner(ModelProfile(layers), bandwidth=1.0).balanced(chunks).stages
        return [0, *itertools.accumulate(len(stage.layers) for stage in stages)]

    def _variables_of(self, modules: Modules) -> list[tuple[str, int]]:
        return [(name, id(each)) for name, module in modules for each in self._variables(module)]

    def _size(self, module: Any) -> int:
        return sum(math.prod(each.shape) for each in self._trained(module))


def _computing(call: Call) -> Callable[[Any], list[Any]]:
    return lambda tensor: [call(tensor, training=True)]


def _name_of(module: Any) -> str:
    """Name of a module that is no attribute of the model."""
    return getattr(module, "__name__", type(module).__name__)
