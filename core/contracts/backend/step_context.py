"""The contract of the third argument of objectives: the step that an objective is part of."""

from __future__ import annotations

import ast
import inspect
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isotrain.core.contracts.backend.replica import Tensor


class StepContext(ABC):
    """The step of one replica, as an objective `objective(model, batch, step)` gets it.

    `all_gather`, `sum` and `mean` are differentiable. Every replica calls them in the same order.

    Attributes:
        replicas: Number of replicas in the run.
        index: Index of this replica.
        is_training: Whether the model trains; False while it is evaluated.
        values: Scalars of this step by name, tensors of the framework: `values` of the spec and of
            `session.step`.
        frozen: Frozen models of the spec by name, to be called with inputs.
    """

    replicas: int
    index: int
    is_training: bool
    values: Mapping[str, Tensor]
    frozen: Mapping[str, Callable[..., Any]]

    @abstractmethod
    def all_gather(self, x: Tensor) -> tuple[Tensor, Any]:
        """Rows of all replicas, in the order of the replicas. Collective.

        Args:
            x: Tensor of shape `[rows, ...]`; the number of rows may differ between replicas.

        Returns:
            The rows of all replicas, shape `[all rows, ...]`, and the index of this replica's first row in
            them. A replica without samples, which computes a placeholder, contributes no rows, and gets 0.
        """

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Sum over all replicas, of a tensor of one shape; replicas without samples add 0. Collective."""

    @abstractmethod
    def mean(self, x: Tensor) -> Tensor:
        """Mean over all replicas, of one shape, weighted by their samples. Collective.

        The mean of each replica's mean over its samples is thus the mean over the global batch.
        """

    @abstractmethod
    def gradient(self, f: Callable[[Any], Tensor], x: Any) -> Any:
        """Gradient of the sum of `f(x)` with respect to `x`, differentiable; also in evaluation. Local.

        Args:
            f: Function of `x` to a tensor of any shape.
            x: Tensor, or list or tuple of tensors, of any shapes.

        Returns:
            Gradients in the structure and shapes of `x`; zeros where `f` does not depend on it.
        """


@dataclass(frozen=True)
class WeightedLosses:
    """Losses with weights, whose mean is over the weights of the global batch.

    Attributes:
        losses: Losses, any shape.
        weights: Weights of them, a shape that broadcasts to that of the losses; 0 or more.
    """

    losses: Tensor
    weights: Tensor


def weighted(losses: Tensor, weights: Tensor) -> WeightedLosses:
    """Losses for an objective to return: `sum(losses * weights) / sum(weights)` over the global batch.

    Args:
        losses: Losses, any shape, such as `[samples, positions]`.
        weights: Weights of them, a shape that broadcasts to that of the losses; 0 or more.
    """
    return WeightedLosses(losses, weights)


def called_collectives(objective: Callable[..., Any]) -> list[str]:
    """Names of the collectives that an objective calls on its third parameter, the step, by its source.

    Functions that it passes the step to are read too.
    """
    function = inspect.unwrap(getattr(objective, "func", objective))
    return sorted(_called_on(function, 2, set()) & {"all_gather", "sum", "mean"})


def _called_on(
    function: Any, parameter: int | str | None, seen: set[tuple[int, int | str | None]]
) -> set[str]:
    """Names of the attributes of an argument that a function reads, itself or in functions that it calls.

    Args:
        function: Function of the user, with or without a source.
        parameter: Index or name of the parameter.
        seen: Identifiers of the functions, with parameters, that are read already.
    """
    key = id(function), parameter
    if key in seen:
        return set()
    seen.add(key)
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, or a lambda within a line
        return set()
    if not isinstance(definition, ast.FunctionDef):
        return set()
    names = [each.arg for each in (*definition.args.posonlyargs, *definition.args.args)]
    if isinstance(parameter, int):
        parameter = names[parameter] if parameter < len(names) else None
    if parameter is None:
        return set()
    called: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == parameter:
            called.add(node.attr)
        elif isinstance(node, ast.Call):
            arguments = [*enumerate(node.args), *((each.arg, each.value) for each in node.keywords)]
            for position, argument in arguments:
                if getattr(argument, "id", None) == parameter:
                    callee = _named(scope, node.func)
                    called |= _called_on(callee, position, seen)
    return called


def _named(names: Mapping[str, Any], node: ast.expr) -> Any:
    """Object that an expression such as `f` or `module.f` names; None for any other."""
    if isinstance(node, ast.Attribute):
        module = _named(names, node.value)
        return getattr(module, node.attr, None) if inspect.ismodule(module) else None
    return names.get(node.id) if isinstance(node, ast.Name) else None


def takes_step(objective: Callable[..., Any]) -> bool:
    """Whether an objective has a third parameter for the step: one without a default, or named `step`."""
    try:
        parameters = inspect.signature(objective).parameters.values()
    except ValueError:  # a compiled function
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [each for each in parameters if each.kind in kinds]
    required = sum(each.default is each.empty for each in positional)
    return required == 3 or (len(positional) > 2 and required < 3 and positional[2].name == "step")
