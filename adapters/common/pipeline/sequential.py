"""A native model that applies modules one after the other, cut between them; imports no framework."""

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
from isotrain.plugin import (
    LayerCost,
    ModelProfile,
    Partitioner,
    PipelineSplit,
    SpecError,
    UnsupportedError,
)

Modules = Sequence[tuple[str, Any]]
"""With their names in the model."""
Call = Callable[..., Any]
"""`call(given, training=...)`: what modules make of a tensor, one after the other."""


class SequentialChunk:
    """Modules of which each takes what the one before gives.

    Attributes:
        input_keys: The chunk before it, of which it takes what that gives; none of the first.
        output_keys: Itself; nothing of the last one.
        modules: Of it.
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

    def __call__(self, known: Mapping[int, Any], training: bool) -> dict[int, Any]:
        """Computes what it gives."""
        return {**known, self._number + 1: self._call(known[self._number], training=training)}

    def boundary_tensors(self, known: Mapping[int, Any]) -> list[Any]:
        """What it gives to the chunk behind it.

        Raises:
            UnsupportedError: That is no tensor.
        """
        found = [known[key] for key in self.output_keys]
        for each in found:
            if not self._is_tensor(each):
                raise UnsupportedError(
                    f"pipeline: the module {self.modules[-1][0]} gives a {type(each).__name__}, and what goes"
                    " over a cut must be one tensor. Cut elsewhere, by the option `cut`."
                )
        return found


class SequentialModel(ABC):
    """Modules that a model applies one after the other, cut.

    Attributes:
        whole: The model.
        chunks: Of it, from the inputs on.
    """

    sequential_class: str
    """What a model is built as that says itself which modules these are."""

    def __init__(self, model: Any, cut: PipelineSplit) -> None:
        """Cuts a model.

        Raises:
            SpecError: There are no such modules, too few, or they do not have all weights.
            UnsupportedError: It is no sequence of modules, or a module would be on both sides of a cut.
        """
        self.whole = model
        named = self._in_turn(cut.modules)
        self._is_compared = named == self._sequence()
        names = [name for name, _ in named]
        if cut.first:
            ends = chunk_bounds(names, cut.first, cut.chunks)
        else:
            ends = self._balanced(named, cut.chunks)
        parts = [named[a:b] for a, b in itertools.pairwise(ends)]
        require_no_shared_weights([self._variables_of(part) for part in parts])
        last = len(parts) - 1
        self.chunks = [self._chunk(n, part, n == last) for n, part in enumerate(parts)]

    @abstractmethod
    def _inside(self) -> Modules:
        """All modules inside of the model, at any depth; one under several names under each."""

    def _sequence(self) -> Modules | None:
        """Those of a model that is nothing but such a sequence."""
        return None

    @abstractmethod
    def _weights(self) -> Iterable[tuple[str, Any]]:
        """What the modules must have all of."""

    @abstractmethod
    def _variables(self, module: Any) -> Iterable[Any]:
        """What a module has that is to be on one stage."""

    @abstractmethod
    def _trained(self, module: Any) -> Sequence[Any]:
        """The weights that a module trains."""

    @abstractmethod
    def _calling(self, modules: Modules) -> Call:
        """What calls modules."""

    @abstractmethod
    def _is_tensor(self, given: Any) -> bool:
        """Whether it is one."""

    def _chunk(self, number: int, modules: Modules, is_last: bool) -> Any:
        """One that has these modules."""
        return SequentialChunk(number, modules, is_last, self._calling(modules), self._is_tensor)

    @abstractmethod
    def _give_the_same(self, given: Any) -> bool:
        """Whether model and modules compute the same of a slice's inputs."""

    def inputs(self, given: Any) -> dict[int, Any]:
        """The tensor that the first module takes.

        Raises:
            SpecError: There are several.
        """
        if not self._is_tensor(given):
            raise SpecError(
                f"data: the inputs are a {type(given).__name__}, and the first module of a pipeline takes"
                " one array."
            )
        return {0: given}

    def check_equivalence(self, given: Any) -> None:
        """Looks once, on all weights, whether the modules one after the other compute what the model does.

        Raises:
            SpecError: They do not.
        """
        if self._is_compared:
            return
        self._is_compared = True
        if not self._give_the_same(given):
            names = ", ".join(name for chunk in self.chunks for name, _ in chunk.modules)
            raise SpecError(
                f"pipeline: the modules {names}, one after the other, do not compute what the model"
                f" ({type(self.whole).__name__}) does."
            )

    def run_in_turn(self, given: Any) -> Any:
        """What the modules make of a slice's inputs, one after the other, and not to train."""
        known = self.inputs(given)
        for chunk in self.chunks:
            known = chunk(known, training=False)
        return known[len(self.chunks)]

    def stage_of_weights(self, stages: int) -> dict[int, int]:
        """The stage of each weight, by its identity."""
        return {
            identity: number % stages
            for number, chunk in enumerate(self.chunks)
            for _, identity in self._variables_of(chunk.modules)
        }

    def layer_calls(self) -> list[ProfiledCall]:
        """Of its modules, in their order."""
        placed = [(n, each) for n, chunk in enumerate(self.chunks) for each in chunk.modules]
        return [
            ProfiledCall(
                module[0],
                chunk,
                [place],
                [place + 1],
                _computing(self._calling([module])),
                self._trained(module[1]),
            )
            for place, (chunk, module) in enumerate(placed)
        ]

    def describe(self, stages: int) -> list[str]:
        """Of each chunk where it is, and its modules: a line each."""
        return [
            f"stage {number % stages + 1} of {stages}: {', '.join(name for name, _ in chunk.modules)};"
            f" {sum(self._size(module) for _, module in chunk.modules)} trainable numbers"
            for number, chunk in enumerate(self.chunks)
        ]

    def _in_turn(self, patterns: Sequence[str]) -> Modules:
        """The modules that the model applies one after the other.

        Args:
            patterns: Of their names, if the spec has some.

        Raises:
            SpecError: There are none of these names, or weights besides.
            UnsupportedError: Nobody says which they are.
        """
        every = self._inside()
        if patterns:
            known = dict(every)
            found = [
                (name, known[name])
                for name in matching_names([name for name, _ in every], patterns)
            ]
        elif callable(given := getattr(self.whole, "pipeline_modules", None)):
            names = {id(module): name for name, module in reversed(every)}
            found = [(names.get(id(each), _name_of(each)), each) for each in given()]
        elif (children := self._sequence()) is not None:
            return children
        else:
            raise UnsupportedError(
                f"strategy pipeline: the model is a {type(self.whole).__name__}, whose modules Python calls;"
                " a native model is cut between modules that are applied one after the other. Build it as"
                f" {self.sequential_class}, give it a method `pipeline_modules` that returns"
                " them, or name them by the"
                " strategy's option `modules`."
            )
        held = {identity for _, identity in self._variables_of(found)}
        left = [name for name, each in self._weights() if id(each) not in held]
        if left:
            raise SpecError(
                f"pipeline: the modules {', '.join(name for name, _ in found)} are to be the whole model, and"
                f" {', '.join(left)} is in none of them."
            )
        return found

    def _balanced(self, modules: Modules, chunks: int) -> list[int]:
        """Where chunks begin, and the end of all, by the numbers that each module trains."""
        layers = [
            LayerCost(name, 1.0 + self._size(module), 0.0, 1, 0, (place - 1,) if place else ())
            for place, (name, module) in enumerate(modules)
        ]
        stages = Partitioner(ModelProfile(layers), bandwidth=1.0).balanced(chunks).stages
        return [0, *itertools.accumulate(len(stage.layers) for stage in stages)]

    def _variables_of(self, modules: Modules) -> list[tuple[str, int]]:
        return [(name, id(each)) for name, module in modules for each in self._variables(module)]

    def _size(self, module: Any) -> int:
        return sum(math.prod(each.shape) for each in self._trained(module))


def _computing(call: Call) -> Callable[[Any], list[Any]]:
    return lambda given: [call(given, training=True)]


def _name_of(module: Any) -> str:
    """Of one that is no attribute of the model."""
    return getattr(module, "__name__", type(module).__name__)
