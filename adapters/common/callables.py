"""Calls of custom losses and metrics: the order of their arguments, and the shapes that may meet.

torch functions take `loss(output, target)`, Keras ones `loss(y_true, y_pred)`. A call in the wrong order
would silently train towards nonsense, and so would targets of shape [N] beside predictions of shape
[N, 1], which broadcast to [N, N]. Imports no framework.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from isotrain.plugin import SpecError, import_strings

if TYPE_CHECKING:
    from isotrain.plugin import ArgumentOrder

Function = Callable[[Any, Any], Any]
"""`function(targets, predictions)`."""
Shape = tuple[int | None, ...]

_TARGETS = {
    *("target", "targets", "true", "truth", "label", "labels", "gt", "expected", "actual"),
    *("answer", "answers", "t"),
}
_PREDICTIONS = {
    *("pred", "preds", "predicted", "prediction", "predictions", "output", "outputs", "out"),
    *("logit", "logits", "score", "scores", "prob", "probs", "probabilities", "input", "hat"),
    *("estimate", "estimated", "recon", "reconstruction", "reconstructed", "p"),
}
_WEAK_TARGETS = {"y", "ys"}
"""Words of targets unless another word of the name says predictions: `y_pred`."""
_ORIGINS: dict[str, ArgumentOrder] = {
    "torch": "predictions-first",
    "optax": "predictions-first",
    "keras": "targets-first",
    "tensorflow": "targets-first",
}
"""Packages whose functions all have one argument order, for parameters whose names do not tell it."""


def targets_first(function: Any, order: ArgumentOrder | None, field: str) -> Function:
    """Wraps a function so that it takes the targets first.

    Args:
        function: Custom or framework loss or metric: a function, a module or a callable object.
        order: Argument order that the spec gives; None to find out.
        field: Field of the spec, for messages.

    Raises:
        SpecError: The order cannot be determined.
    """
    known_order = order or argument_order_of(function)
    if known_order is None:
        raise SpecError(
            f"{field}: {import_strings.describe(function)!r} takes"
            f" ({', '.join(_parameters(function))}), which"
            " does not tell whether the targets or the predictions come first. Name its parameters"
            " (targets, predictions) or (output, target), or set the order in the spec:"
            f" {{call: ..., order: targets-first}} or {{call: ..., order: predictions-first}}."
        )
    if known_order == "targets-first":
        return function

    @functools.wraps(_inner(function))
    def targets_first(targets: Any, predictions: Any) -> Any:
        return function(predictions, targets)

    return targets_first


def argument_order_of(function: Any) -> ArgumentOrder | None:
    """Order of a function's arguments: by their names, else by its package; None if unknown."""
    kinds = [_kind(name) for name in _parameters(function)[:2]]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        first = kinds[0] or ("predictions" if kinds[1] == "targets" else "targets")
        return "targets-first" if first == "targets" else "predictions-first"
    orders = {_ORIGINS.get(package) for package in _packages(function)} - {None}
    return orders.pop() if len(orders) == 1 else None


def _kind(name: str) -> Literal["targets", "predictions"] | None:
    """Whether a parameter of this name holds targets or predictions; None if the name does not tell."""
    words = set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))
    is_target, is_prediction = bool(words & _TARGETS), bool(words & _PREDICTIONS)
    if is_target != is_prediction:
        return "targets" if is_target else "predictions"
    return "targets" if words & _WEAK_TARGETS and not is_prediction else None


def _inner(function: Any) -> Any:
    """The function behind `functools.partial`; of a module its `forward`."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "forward", function)


def _parameters(function: Any) -> list[str]:
    """Names of the positional parameters, without those bound by `functools.partial`."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    try:
        parameters = inspect.signature(_inner(function)).parameters.values()
    except (TypeError, ValueError):  # a compiled function
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in positional and parameter.name not in bound
    ]


def _packages(function: Any) -> Iterator[str]:
    """Packages of a function, or of the classes of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    module_name = getattr(function, "__module__", None)
    modules = (
        [module_name]
        if inspect.isroutine(function)
        else [cls.__module__ for cls in type(function).__mro__]
    )
    for module in modules:
        yield str(module).partition(".")[0]


def refusing_broadcast(function: Function, label: str, squeeze: bool) -> Function:
    """Wraps a custom function so that it refuses to broadcast targets against predictions.

    Args:
        function: Function that takes the targets first.
        label: Name of the function, for messages.
        squeeze: Whether to drop the last axis, of length 1, of the tensor that has one axis more, as Keras
            does for its own losses.
    """

    @functools.wraps(_inner(function))
    def call(targets: Any, predictions: Any) -> Any:
        if not (_is_tensor(targets) and _is_tensor(predictions)):
            return function(targets, predictions)
        if squeeze:
            targets, predictions = _squeezed(targets, predictions)
        _refuse_broadcasting(targets, predictions, label)
        result = function(targets, predictions)
        _require_per_sample(result, predictions, label)
        return result

    return call


def require_tensor(result: Any, label: str) -> Any:
    """Returns the result of a loss or objective if it is a tensor of a framework.

    Raises:
        SpecError: It is not.
    """
    if _is_tensor(result):
        return result
    raise SpecError(
        f"{label} returned {type(result).__name__!r}; expected a tensor of the framework: one value per"
        " sample, or their mean."
    )


def _is_tensor(value: Any) -> bool:
    import numpy as np  # not above: plans, which start sooner without it, need none

    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return is_array and not isinstance(value, np.ndarray | np.generic)


def _squeezed(targets: Any, predictions: Any) -> tuple[Any, Any]:
    """Targets and predictions, without a last axis of length 1 that only one of them has."""
    extra_axes = len(predictions.shape) - len(targets.shape)
    if extra_axes == 1 and predictions.shape[-1] == 1 and len(targets.shape) > 0:
        return targets, predictions[..., 0]
    if extra_axes == -1 and targets.shape[-1] == 1 and len(predictions.shape) > 0:
        return targets[..., 0], predictions
    return targets, predictions


def _refuse_broadcasting(targets: Any, predictions: Any, label: str) -> None:
    """Refuses shapes that would only match by broadcasting.

    Integers beside more axes are class indices beside their scores, whatever their shapes.

    Raises:
        SpecError: The shapes match only by broadcasting.
    """
    target_shape, prediction_shape = tuple(targets.shape), tuple(predictions.shape)
    if target_shape == prediction_shape or not _broadcast(target_shape, prediction_shape):
        return
    longer = max(target_shape, prediction_shape, key=len)
    column = abs(len(target_shape) - len(prediction_shape)) == 1 and longer[-1] == 1
    if column or (_is_floating(targets) and _is_floating(predictions)):
        raise SpecError(
            f"{label} is called with targets of shape {_shown(target_shape)} and predictions of shape"
            f" {_shown(prediction_shape)}, which match only by broadcasting: every target would meet the"
            " predictions of other samples or outputs. Give both the same shape, in the data or at the end of"
            " the model; an `objective` may combine them freely."
        )


def _broadcast(left: Shape, right: Shape) -> bool:
    """Whether two different shapes broadcast; an axis of unknown length matches any."""
    if len(left) == len(right) and all(
        a == b or None in (a, b) for a, b in zip(left, right, strict=True)
    ):
        return False
    pairs = zip(reversed(left), reversed(right), strict=False)
    return bool(left and right) and all(a == b or 1 in (a, b) or None in (a, b) for a, b in pairs)


def _is_floating(tensor: Any) -> bool:
    return "float" in str(tensor.dtype)  # of any framework


def _require_per_sample(result: Any, predictions: Any, label: str) -> None:
    """Refuses results that belong to no sample: [N, N] from predictions of shape [N] or [N, 1].

    Raises:
        SpecError: The result's shape is no prefix of the predictions' shape.
    """
    shape, outputs = tuple(require_tensor(result, label).shape), tuple(predictions.shape)
    if len(shape) > 1 and not _is_prefix(shape, outputs):
        raise SpecError(
            f"{label} returned shape {_shown(shape)} for predictions of shape {_shown(outputs)}; expected one"
            " value per sample, or their mean. Did targets and predictions broadcast?"
        )


def _is_prefix(shape: Sequence[int | None], full: Sequence[int | None]) -> bool:
    pairs = zip(shape, full, strict=False)
    return len(shape) <= len(full) and all(a == b or None in (a, b) for a, b in pairs)


def _shown(shape: Shape) -> str:
    return f"[{', '.join('N' if length is None else str(length) for length in shape)}]"
