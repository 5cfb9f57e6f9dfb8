"""What a spec chose, made ready to be called: what all adapters share; imports no framework."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from isotrain.adapters import called
from isotrain.plugin import Component, SpecError, references


def select(given: Any, framework: str, field: str) -> Any:
    """Picks this framework's entry where the spec gives one per framework, and imports it.

    Raises:
        SpecError: Nothing is given for this framework, or it cannot be imported.
    """
    if isinstance(given, Mapping):
        if framework not in given:
            raise SpecError(
                f"{field}: nothing is given for the framework {framework!r}; given for:"
                f" {', '.join(sorted(given))}."
            )
        given = given[framework]
    return references.resolve(given)


def snake_case(name: str) -> str:
    """A class's name in small letters: `mean_squared_error`, `kl_divergence`."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def constructed(make: Any, chosen: Component, field: str, **defaults: Any) -> Any:
    """Calls a class or function with the options of the spec.

    Args:
        make: What to call.
        chosen: Gives the options.
        field: Of the spec, for messages.
        defaults: Options for which the spec gives none.

    Raises:
        SpecError: It refuses them.
    """
    try:
        return make(**{**defaults, **chosen.options})
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"{field}: {chosen.label!r} refuses the options {chosen.options}: {error}"
        ) from error


def found(chosen: Component, field: str) -> Any:
    """A person's own loss or metric, its options given to it: an object of a class, or a function."""
    own = references.resolve(chosen.name)
    if isinstance(own, type):
        return constructed(own, chosen, field)
    return functools.partial(own, **chosen.options) if chosen.options else own


def as_function(
    own: Any, chosen: Component, field: str, *, squeeze: bool = True
) -> called.Function:
    """A person's own loss or metric as it is called here: `function(targets, predictions)`.

    Args:
        own: What `found` gave.
        chosen: What the spec says of it.
        field: Of the spec, for messages.
        squeeze: Whether it gets targets and predictions without a last axis of length 1 that only one of
            them has, as Keras' own losses do; without it they are refused.
    """
    function = called.arranged(own, chosen.order, field)
    return called.aligned(function, f"{field}: {chosen.label!r}", squeeze)
