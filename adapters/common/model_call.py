"""Calls of the model: with its inputs, by keywords, or by a user's function; imports no framework."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from isotrain.adapters.common.spec_components import resolve_for_framework
from isotrain.plugin import SpecError

if TYPE_CHECKING:
    from isotrain.plugin import TrainingSpec


def model_call(spec: TrainingSpec, framework: str, model: Any) -> Callable[..., Any]:
    """The function from inputs to predictions: the model itself, or what `call` in the spec makes of it.

    It passes options, such as Keras' `training`, on to the model; to a function only those that it takes.

    Args:
        spec: Training spec, which may have a `call`.
        framework: Framework whose function is used, where the spec has one per framework.
        model: Model to call.

    Raises:
        SpecError: The function cannot be imported.
    """
    if spec.call is None:
        return model
    if spec.call == "keywords":
        return functools.partial(_by_keywords, model)
    function = resolve_for_framework(spec.call, framework, "call")
    return functools.partial(_by_function, function, model)


def _by_keywords(model: Any, inputs: Any, **options: Any) -> Any:
    """Calls the model with the parts of its inputs as keyword arguments.

    Raises:
        SpecError: The inputs have no names.
    """
    if not isinstance(inputs, Mapping):
        raise SpecError(
            f"call: keywords needs inputs with names, a dict; the data have {type(inputs).__name__}. Name"
            " them in the data, as in isotrain.sources.arrays(inputs={...}, targets=...), or leave call out."
        )
    return model(**inputs, **options)


def _by_function(function: Callable[..., Any], model: Any, inputs: Any, **options: Any) -> Any:
    """Calls a user's `call(model, inputs)`, with the options that it has parameters for."""
    parameters = inspect.signature(function).parameters
    return function(model, inputs, **{n: v for n, v in options.items() if n in parameters})
