"""What a Keras computation does, written down as a list of torch operations."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import torch

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.carried_state import CarryScope
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.no_grad import WithoutGradients
from isotrain.adapters.torch.base.pytree import emptied, filled, leaves
from isotrain.adapters.torch.graph.codegen import compile_direct_calls
from isotrain.adapters.torch.graph.guards.python_state import PythonState
from isotrain.adapters.torch.graph.passes import exact as exact_passes
from isotrain.adapters.torch.graph.passes import fast as fast_passes
from isotrain.adapters.torch.graph.traceability import (
    CALLED_BY_VMAP,
    VALUE_DEPENDENT,
    ForbidValueReads,
    UncapturableError,
    require_fixed_shapes,
)
from isotrain.adapters.torch.graph.verify import Snapshot

Compute = Callable[[Any, Any], tuple[torch.Tensor, Any]]
"""`compute(inputs, targets)`: the mean loss and the predictions."""
UNCOMPILED_RANDOM = "they draw random numbers, of which torch's compiler would draw others"


@dataclass(frozen=True, eq=False)
class TracedGraph:
    """The operations of one computation, for inputs of one signature.

    Attributes:
        graph: From the flat arguments to loss, leaves of the predictions, their masks, and moved values.
        variables: The Keras variables' tensors that it reads.
        constants: Further tensors that it reads.
        moved: Tensors that a step moves, in the order of the graph's last outputs.
        predictions: Their structure.
        masked: Which leaves of the predictions have a mask.
        carried: Which of the variables are given as copies: the backward pass needs what it had.
        forward: Computes the graph.
    """

    graph: torch.fx.GraphModule
    variables: list[torch.Tensor]
    constants: list[torch.Tensor]
    moved: list[torch.Tensor]
    predictions: Any
    masked: list[int]
    carried: list[int]
    forward: Callable[..., Any]

    @property
    def optimized(self) -> TracedGraph | None:
        """The same by other, faster operations, up to rounding; None where there are none."""
        graph = fast_passes.optimized(self.graph)
        return (
            None
            if graph is None
            else replace(self, graph=graph, forward=compile_direct_calls(graph))
        )

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, from torch's generator or from those that the graph holds."""
        return any(map(exact_passes.draws, self.graph.graph.nodes))

    @property
    def compiled(self) -> TracedGraph | None:
        """The same by torch's compiler, up to rounding; None where it draws random numbers."""
        if self.draws:
            return None
        from isotrain.adapters.torch.base.compile import compiled

        return replace(self, forward=compiled(self.graph, any_shape=False))

    def __call__(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Computes the mean loss and the predictions, and moves what a step moves."""
        variables = self.variables
        if self.carried:
            variables = list(variables)
            for place in self.carried:
                variables[place] = variables[place].clone()
        given = self.forward(*variables, *self.constants, *leaves(inputs), *leaves(targets))
        if self.moved:
            with torch.no_grad():
                private_api.foreach_copy_(self.moved, given[-len(self.moved) :])
        return given[0], self._predictions(given)

    def _predictions(self, given: Sequence[torch.Tensor]) -> Any:
        found = iter(given[1:])
        predictions = filled(self.predictions, found)
        if self.masked:
            parts = list(leaves(predictions))
            for position in self.masked:
                keras_private.set_mask(parts[position], next(found))
        return predictions


@dataclass
class _Trace:
    """One call of a computation without effects, and what it showed besides its operations."""

    compute: Compute
    variables: Sequence[Any]
    inputs: Any
    targets: Any
    carried: Sequence[Any] = ()
    generators: list[torch.Generator] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    predictions: Any = None

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """The computation as a function of tensors alone."""
        count = len(self.variables)
        tensors = iter(given[count:])
        inputs, targets = filled(self.inputs, tensors), filled(self.targets, tensors)
        scope = CarryScope(
            [*zip(self.variables, given[:count], strict=True)], self.carried, collect_losses=True
        )
        before = [scope.get_current_value(variable) for variable in self.variables]
        with keras_private.seeded_generators(self._generator), scope, ForbidValueReads():
            loss, self.predictions = self.compute(inputs, targets)
        after = [scope.get_current_value(variable) for variable in self.variables]
        if len(scope.state_mapping) > count:
            raise UncapturableError("it moves a variable that is not one of the model's")
        self.moved = [i for i in range(count) if after[i] is not before[i]]
        parts = list(leaves(self.predictions))
        masks = [keras_private.mask_of(part) for part in parts]
        self.masked = [i for i, mask in enumerate(masks) if mask is not None]
        return [
            loss,
            *parts,
            *(masks[i] for i in self.masked),
            *(after[i] for i in self.moved),
        ]

    def _generator(self, first: torch.Tensor, second: torch.Tensor) -> torch.Generator:
        """A generator of the record's own, which each replay seeds anew from the model's state."""
        generator = torch.Generator(first.device)
        torch.ops.isotrain.seed(first + second, len(self.generators))
        self.generators.append(generator)
        return generator


def capture(
    compute: Compute,
    state: PythonState,
    variables: Sequence[Any],
    inputs: Any,
    targets: Any,
    carried: Sequence[Any] = (),
) -> TracedGraph:
    """Writes down a computation; nothing moves, and no random numbers are used up.

    Args:
        compute: What to call.
        state: What it depends on besides tensors, as it is now.
        variables: Of the model, all of them.
        inputs: Of one slice.
        targets: Of the same.
        carried: Those of the variables that are no weights.

    Raises:
        UncapturableError: It depends on more than tensors.
    """
    tensors = [variable.value for variable in variables]
    trace = _Trace(compute, variables, inputs, targets, carried)
    given = [*(tensor.detach() for tensor in tensors), *leaves(inputs), *leaves(targets)]
    with _torch_unmoved(given), _python_unmoved(state):
        try:
            graph = private_api.traced(trace, *given)
        except Exception as error:
            raise UncapturableError(_why(error)) from error
        require_fixed_shapes(graph.graph)
    constants = exact_passes.simplify(graph, len(tensors), trace.generators)
    moved = [tensors[index] for index in trace.moved]
    predictions = emptied(trace.predictions)
    forward = compile_direct_calls(graph)
    own = {id(variable) for variable in carried}
    places = [place for place, variable in enumerate(variables) if id(variable) in own]
    return TracedGraph(graph, tensors, constants, moved, predictions, trace.masked, places, forward)


def predicted(compute: Compute, inputs: Any, targets: Any) -> Any:
    """What a computation predicts; nothing moves, and none of torch's random numbers are used up."""
    scope = keras.StatelessScope(collect_losses=True)
    with _torch_unmoved([*leaves(inputs)]), scope:
        return WithoutGradients()(compute, inputs, targets)[1]


def _why(error: Exception) -> str:
    """The reason that a computation cannot be recorded, in a line."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    where = keras_private.layer_of_error(str(error))
    if VALUE_DEPENDENT in str(error) or private_api.VALUE_READ_ERROR in str(error):
        reason = VALUE_DEPENDENT
    elif CALLED_BY_VMAP in str(error):
        reason = CALLED_BY_VMAP
    elif isinstance(error, UncapturableError):
        reason = lines[0]
    else:
        reason = f"{type(error).__name__}: {lines[1 if where and len(lines) > 1 else 0]}"
    return f"in the layer {where}, {reason}" if where else reason


@contextmanager
def _python_unmoved(state: PythonState) -> Iterator[None]:
    """Refuses a computation that changes Python's own state: a record would freeze it.

    Args:
        state: As it is before the computation.

    Raises:
        UncapturableError: An attribute changes in a call, numbers are drawn from Python
            or NumPy, or somebody waits for the calls of layers.
    """
    if state.is_hooked:
        raise UncapturableError("a hook waits for the call of a layer")
    kept = Snapshot(state.tensors)
    ours, numpys = python_random.getstate(), np.random.get_state()
    position = _comparable(numpys)
    try:
        yield
    finally:
        drawn = python_random.getstate() != ours or _comparable(np.random.get_state()) != position
        python_random.setstate(ours)
        np.random.set_state(numpys)
        change = None if state.is_unchanged else state.change()
        state.restore()
        if change is not None:
            kept.restore()
    if drawn:
        raise UncapturableError("it draws random numbers from Python's or NumPy's own generator")
    if change is not None:
        raise UncapturableError(f"a call changes an attribute: {change}")


def _comparable(state: Any) -> tuple[Any, ...]:
    """The state of NumPy's generator, its numbers as bytes."""
    name, numbers, *others = state
    return name, numbers.tobytes(), *others


def _torch_unmoved(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Keeps torch's own generators as they are."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return torch.random.fork_rng([device.index or 0 for device in devices])
