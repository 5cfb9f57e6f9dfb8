"""How a person's own loss or metric is called: the order of its arguments, and the shapes that may meet.

People of torch write `loss(output, target)`, people of Keras `loss(y_true, y_pred)`. A call in the wrong
order would train towards nonsense without a word, and so would targets of shape [N] beside predictions of
shape [N, 1], which broadcast to [N, N]. Imports no framework.
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
"""Targets, but for what stands beside them: `y_pred` is a prediction."""
_ORIGINS: dict[str, ArgumentOrder] = {
    "torch": "predictions-first",
    "optax": "predictions-first",
    "keras": "targets-first",
    "tensorflow": "targets-first",
}
"""Packages whose functions all have one order, for those of them whose parameters do not tell it."""


def targets_first(function: Any, order: ArgumentOrder | None, field: str) -> Function:
    """The function as it is called here: with the targets first.

    Args:
        function: A loss or metric of a person, or of a framework: a function, a module, an object.
        order: What the spec says of it; None to find out.
        field: Of the spec, for messages.

    Raises:
        SpecError: Nothing tells the order.
    """
    known = order or argument_order_of(function)
    if known is None:
        raise SpecError(
            f"{field}: {import_strings.describe(function)!r} takes"
            f" ({', '.join(_parameters(function))}), which"
            " does not tell whether the targets or the predictions come first. Name its parameters"
            " (targets, predictions) or (output, target), or say it in the spec:"
            f" {{call: ..., order: targets-first}} or {{call: ..., order: predictions-first}}."
        )
    if known == "targets-first":
        return function

    @functools.wraps(_inner(function))
    def targets_first(targets: Any, predictions: Any) -> Any:
        return function(predictions, targets)

    return targets_first


def argument_order_of(function: Any) -> ArgumentOrder | None:
    """The order of a function's arguments: by their names, else by its package; None if unknown."""
    kinds = [_kind(name) for name in _parameters(function)[:2]]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        first = kinds[0] or ("predictions" if kinds[1] == "targets" else "targets")
        return "targets-first" if first == "targets" else "predictions-first"
    found = {_ORIGINS.get(package) for package in _packages(function)} - {None}
    return found.pop() if len(found) == 1 else None


def _kind(name: str) -> Literal["targets", "predictions"] | None:
    """What a parameter of that name holds."""
    words = set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))
    of_targets, of_predictions = bool(words & _TARGETS), bool(words & _PREDICTIONS)
    if of_targets != of_predictions:
        return "targets" if of_targets else "predictions"
    return "targets" if words & _WEAK_TARGETS and not of_predictions else None


def _inner(function: Any) -> Any:
    """What is really called: without the options bound to it, and of a module its own computation."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "forward", function)


def _parameters(function: Any) -> list[str]:
    """The names of its positional parameters, those that options have taken left out."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    try:
        found = inspect.signature(_inner(function)).parameters.values()
    except (TypeError, ValueError):  # of a compiled function
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in found if each.kind in positional and each.name not in bound]


def _packages(function: Any) -> Iterator[str]:
    """The packages that a function, or the classes of an object, are from."""
    while isinstance(function, functools.partial):
        function = function.func
    own = getattr(function, "__module__", None)
    modules = (
        [own] if inspect.isroutine(function) else [c.__module__ for c in type(function).__mro__]
    )
    for module in modules:
        yield str(module).partition(".")[0]


def refusing_broadcast(function: Function, label: str, squeeze: bool) -> Function:
    """A person's function, kept from broadcasting targets against predictions.

    Args:
        function: Called with the targets first.
        label: Of the function, for messages.
        squeeze: Whether to drop the last axis, of length 1, of the one that has an axis more, as Keras does
            for its own losses.
    """

    @functools.wraps(_inner(function))
    def call(targets: Any, predictions: Any) -> Any:
        if not (_is_tensor(targets) and _is_tensor(predictions)):
            return function(targets, predictions)
        if squeeze:
            targets, predictions = _squeezed(targets, predictions)
        _refuse_broadcasting(targets, predictions, label)
        given = function(targets, predictions)
        _require_per_sample(given, predictions, label)
        return given

    return call


def require_tensor(given: Any, label: str) -> Any:
    """What a loss or objective gave, if it is a tensor.

    Raises:
        SpecError: It is none of a framework.
    """
    if _is_tensor(given):
        return given
    raise SpecError(
        f"{label} returned {type(given).__name__!r}; expected a tensor of the framework: one value per"
        " sample, or their mean."
    )


def _is_tensor(value: Any) -> bool:
    import numpy as np  # not above: plans, which start sooner without it, need none

    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return is_array and not isinstance(value, np.ndarray | np.generic)


def _squeezed(targets: Any, predictions: Any) -> tuple[Any, Any]:
    more = len(predictions.shape) - len(targets.shape)
    if more == 1 and predictions.shape[-1] == 1 and len(targets.shape) > 0:
        return targets, predictions[..., 0]
    if more == -1 and targets.shape[-1] == 1 and len(predictions.shape) > 0:
        return targets[..., 0], predictions
    return targets, predictions


def _refuse_broadcasting(targets: Any, predictions: Any, label: str) -> None:
    """Refuses shapes that would only agree by broadcasting.

    Integers beside more axes are classes beside their scores, whatever the numbers of both are.
    """
    one, two = tuple(targets.shape), tuple(predictions.shape)
    if one == two or not _broadcast(one, two):
        return
    longer = max(one, two, key=len)
    column = abs(len(one) - len(two)) == 1 and longer[-1] == 1
    if column or (_is_floating(targets) and _is_floating(predictions)):
        raise SpecError(
            f"{label} is called with targets of shape {_shown(one)} and predictions of shape"
            f" {_shown(two)}, which agree only by broadcasting: every target would meet the predictions"
            " of other samples or outputs. Give both one shape, in the data or at the end of the model;"
            " an `objective` may do what it likes with them."
        )


def _broadcast(one: Shape, two: Shape) -> bool:
    """Whether two different shapes broadcast; an axis of unknown length agrees with any."""
    if len(one) == len(two) and all(
        a == b or None in (a, b) for a, b in zip(one, two, strict=True)
    ):
        return False
    pairs = zip(reversed(one), reversed(two), strict=False)
    return bool(one and two) and all(a == b or 1 in (a, b) or None in (a, b) for a, b in pairs)


def _is_floating(tensor: Any) -> bool:
    return "float" in str(tensor.dtype)  # of any framework


def _require_per_sample(given: Any, predictions: Any, label: str) -> None:
    """Refuses values that belong to no sample: [N, N] from predictions of shape [N] or [N, 1]."""
    shape, outputs = tuple(require_tensor(given, label).shape), tuple(predictions.shape)
    if len(shape) > 1 and not _is_prefix(shape, outputs):
        raise SpecError(
            f"{label} returned shape {_shown(shape)} for predictions of shape {_shown(outputs)}; expected one"
            " value per sample, or their mean. Did targets and predictions broadcast?"
        )


def _is_prefix(shape: Sequence[int | None], whole: Sequence[int | None]) -> bool:
    pairs = zip(shape, whole, strict=False)
    return len(shape) <= len(whole) and all(a == b or None in (a, b) for a, b in pairs)


def _shown(shape: Shape) -> str:
    return f"[{', '.join('N' if length is None else str(length) for length in shape)}]"
