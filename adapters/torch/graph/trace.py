"""Tracing of a Keras computation into an fx graph of aten operations."""

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
from isotrain.adapters.torch.base import gpu, private_api
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
"""`compute(inputs, targets)` returns the mean loss and the predictions."""
UNCOMPILED_RANDOM = "they draw random numbers, and torch's compiler would draw different ones"


@dataclass(frozen=True, eq=False)
class TracedGraph:
    """The traced operations of one computation, for inputs of one signature.

    Attributes:
        graph: fx graph. Arguments: variables, constants, leaves of inputs and targets. Outputs: loss, leaves
            of the predictions, their masks, and new values of the updated tensors.
        variables: Tensors of the Keras variables, the graph's first arguments.
        constants: Further tensors that it reads, the arguments after the variables.
        updated: Tensors that a step updates in place, in the order of the graph's last outputs.
        predictions: Pytree with the structure of the predictions, without their tensors.
        masked: Indices of the predictions' leaves that have a Keras mask.
        carried: Indices of the variables that are passed as copies: the backward pass needs their old values.
        forward: Function that executes the graph.
    """

    graph: torch.fx.GraphModule
    variables: list[torch.Tensor]
    constants: list[torch.Tensor]
    updated: list[torch.Tensor]
    predictions: Any
    masked: list[int]
    carried: list[int]
    forward: Callable[..., Any]

    def optimized(self, *, exactly: bool) -> TracedGraph | None:
        """Graph with faster operations, equal up to rounding or to the bit; None if no pass applies."""
        graph = fast_passes.optimized(self.graph, exactly=exactly)
        return (
            None
            if graph is None
            else replace(self, graph=graph, forward=compile_direct_calls(graph))
        )

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, from torch's generator or from the graph's own."""
        return any(map(exact_passes.draws, self.graph.graph.nodes))

    @property
    def compiled(self) -> TracedGraph | None:
        """Graph compiled by `torch.compile`, equal up to rounding; None if it draws random numbers."""
        if self.draws:
            return None
        from isotrain.adapters.torch.base.compile import compiled

        return replace(self, forward=compiled(self.graph, any_shape=False))

    def __call__(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Replays a step on batches `[samples, ...]`: loss (shapes: see `LossModule`) and predictions.

        It updates moving statistics and other variables that the step changed.
        """
        variables = self.variables
        if self.carried:
            variables = list(variables)
            for index in self.carried:
                variables[index] = variables[index].clone()
        outputs = self.forward(*variables, *self.constants, *leaves(inputs), *leaves(targets))
        if self.updated:
            with torch.no_grad():
                private_api.foreach_copy_(self.updated, outputs[-len(self.updated) :])
        return outputs[0], self._predictions(outputs)

    def _predictions(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Pytree of predictions, shapes `[samples, ...]`, from the graph's outputs; masks are set again."""
        tensors = iter(outputs[1:])
        predictions = filled(self.predictions, tensors)
        if self.masked:
            parts = list(leaves(predictions))
            for index in self.masked:
                keras_private.set_mask(parts[index], next(tensors))
        return predictions


@dataclass
class _Trace:
    """A computation as a function of tensors alone; notes what a call does besides its operations.

    Attributes:
        compute: Computation to trace.
        variables: All Keras variables of the model.
        inputs: Inputs of one slice; only their structure matters.
        targets: Targets of the slice; likewise.
        carried: Subset of the variables that are not weights.
        generators: Generators that the trace seeds, in order.
        updated: Indices of the variables that the call assigned.
        masked: Indices of the predictions' leaves that have a Keras mask.
        predictions: Predictions of the call.
    """

    compute: Compute
    variables: Sequence[Any]
    inputs: Any
    targets: Any
    carried: Sequence[Any] = ()
    generators: list[torch.Generator] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    predictions: Any = None

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Computes from variables and leaves of a batch, any shapes; returns the graph's outputs.

        Raises:
            UncapturableError: The computation assigns a variable that is not one of the model's.
        """
        count = len(self.variables)
        batch = iter(tensors[count:])
        inputs, targets = filled(self.inputs, batch), filled(self.targets, batch)
        scope = CarryScope(
            [*zip(self.variables, tensors[:count], strict=True)], self.carried, collect_losses=True
        )
        before = [scope.get_current_value(variable) for variable in self.variables]
        with keras_private.seeded_generators(self._generator), scope, ForbidValueReads():
            loss, self.predictions = self.compute(inputs, targets)
        after = [scope.get_current_value(variable) for variable in self.variables]
        if len(scope.state_mapping) > count:
            raise UncapturableError("it assigns a variable that is not one of the model's")
        self.updated = [i for i in range(count) if after[i] is not before[i]]
        parts = list(leaves(self.predictions))
        masks = [keras_private.mask_of(part) for part in parts]
        self.masked = [i for i, mask in enumerate(masks) if mask is not None]
        return [
            loss,
            *parts,
            *(masks[i] for i in self.masked),
            *(after[i] for i in self.updated),
        ]

    def _generator(self, first: torch.Tensor, second: torch.Tensor) -> torch.Generator:
        """A generator of the graph, which each replay seeds anew from two scalars of the model's state."""
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
    """Traces a computation with `make_fx` and simplifies the graph; state and generators stay unchanged.

    Args:
        compute: Computation to trace.
        state: Python state that it depends on besides tensors, as it is now.
        variables: All Keras variables of the model.
        inputs: Inputs of one slice, a pytree of tensors.
        targets: Targets of that slice, a pytree of tensors.
        carried: Subset of the variables that are not weights.

    Raises:
        UncapturableError: It depends on more than tensors.
    """
    tensors = [variable.value for variable in variables]
    trace = _Trace(compute, variables, inputs, targets, carried)
    arguments = [*(tensor.detach() for tensor in tensors), *leaves(inputs), *leaves(targets)]
    with _preserved_torch_rng(arguments), _unchanged_python_state(state):
        try:
            graph = private_api.traced(trace, *arguments)
        except Exception as error:
            raise UncapturableError(_reason(error)) from error
        require_fixed_shapes(graph.graph)
    constants = exact_passes.simplify(graph, len(tensors), trace.generators)
    updated = [tensors[index] for index in trace.updated]
    predictions = emptied(trace.predictions)
    forward = compile_direct_calls(graph)
    carried_ids = {id(variable) for variable in carried}
    copied = [index for index, variable in enumerate(variables) if id(variable) in carried_ids]
    return TracedGraph(
        graph, tensors, constants, updated, predictions, trace.masked, copied, forward
    )


def predicted(compute: Compute, inputs: Any, targets: Any) -> Any:
    """Predictions of a computation; model state and torch's generators stay unchanged."""
    scope = keras.StatelessScope(collect_losses=True)
    with _preserved_torch_rng([*leaves(inputs)]), scope:
        return WithoutGradients()(compute, inputs, targets)[1]


def _reason(error: Exception) -> str:
    """The reason that a computation cannot be captured, in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    layer = keras_private.layer_of_error(str(error))
    if VALUE_DEPENDENT in str(error) or private_api.VALUE_READ_ERROR in str(error):
        reason = VALUE_DEPENDENT
    elif CALLED_BY_VMAP in str(error):
        reason = CALLED_BY_VMAP
    elif isinstance(error, UncapturableError):
        reason = lines[0]
    else:
        reason = f"{type(error).__name__}: {lines[1 if layer and len(lines) > 1 else 0]}"
    return f"in the layer {layer}, {reason}" if layer else reason


@contextmanager
def _unchanged_python_state(state: PythonState) -> Iterator[None]:
    """Refuses a computation that changes Python state, which a graph would freeze; restores that state.

    Args:
        state: Python state before the computation.

    Raises:
        UncapturableError: A call changes an attribute, a class attribute, a global or a variable of a
            closure, or may advance an iterator; random numbers are drawn from Python or NumPy; or a
            torch hook is registered on a layer.
    """
    if state.is_hooked:
        raise UncapturableError("a hook is registered on a layer")
    if state.iterators:
        raise UncapturableError(f"a call may advance an iterator: {state.iterators[0]}")
    snapshot = Snapshot(state.tensors)
    python_state, numpy_state = python_random.getstate(), np.random.get_state()
    comparable_state = _comparable(numpy_state)
    try:
        yield
    finally:
        has_drawn = (
            python_random.getstate() != python_state
            or _comparable(np.random.get_state()) != comparable_state
        )
        python_random.setstate(python_state)
        np.random.set_state(numpy_state)
        change = state.changes_in_call()
        state.restore()
        if change is not None:
            snapshot.restore()
    if has_drawn:
        raise UncapturableError("it draws random numbers from Python's or NumPy's global generator")
    if change is not None:
        raise UncapturableError(f"a call changes {change}")


def _comparable(state: Any) -> tuple[Any, ...]:
    """The state of NumPy's generator, its array as bytes."""
    name, key, *others = state
    return name, key.tobytes(), *others


def _preserved_torch_rng(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Restores torch's generators afterwards, those of the devices of tensors (any shape) too."""
    return torch.random.fork_rng(gpu.holding(tensors))
