"""What a spec chose, made ready to be called: what all adapters share; imports no framework."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isotrain.adapters.common import callables
from isotrain.plugin import SpecError, import_strings

if TYPE_CHECKING:
    from isotrain.plugin import Component


def resolve_for_framework(given: Any, framework: str, field: str) -> Any:
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
    return import_strings.resolve(given)


def snake_case(name: str) -> str:
    """A class's name in small letters: `mean_squared_error`, `kl_divergence`."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def instantiate(make: Any, chosen: Component, field: str, **defaults: Any) -> Any:
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


def call_checked(form: str, make: Any, field: str, *given: Any, **options: Any) -> Any:
    """Calls a person's function, once it is known to take what it is given.

    Args:
        form: How it is called, for messages.
        make: The function.
        field: Of the spec, for messages.
        given: Positional arguments.
        options: Those that the spec gives.

    Raises:
        SpecError: It does not take them.
    """
    try:
        inspect.signature(make).bind(*given, **options)
    except TypeError as error:
        raise SpecError(
            f"{field}: {import_strings.describe(make)!r} cannot be called as {form}: {error}."
            " Its parameters are"
            f" {inspect.signature(make)}."
        ) from None
    except ValueError:  # of a compiled function
        pass
    return make(*given, **options)


def name_option(cls: type) -> dict[str, str]:
    """The option `name` of a class that would count its objects instead: auc, auc_1, ..."""
    name = inspect.signature(cls).parameters.get("name")
    counts = name is not None and name.default is None
    return {"name": snake_case(cls.__name__)} if counts else {}


def build_custom(chosen: Component, field: str) -> Any:
    """A person's own loss or metric, its options given to it: an object of a class, or a function."""
    own = import_strings.resolve(chosen.name)
    if isinstance(own, type):
        return instantiate(own, chosen, field, **name_option(own))
    return functools.partial(own, **chosen.options) if chosen.options else own


def as_function(
    own: Any, chosen: Component, field: str, *, squeeze: bool = True
) -> callables.Function:
    """A person's own loss or metric as it is called here: `function(targets, predictions)`.

    Args:
        own: What `found` gave.
        chosen: What the spec says of it.
        field: Of the spec, for messages.
        squeeze: Whether it gets targets and predictions without a last axis of length 1 that only one of
            them has, as Keras' own losses do; without it they are refused.
    """
    function = callables.targets_first(own, chosen.order, field)
    return callables.refusing_broadcast(function, f"{field}: {chosen.label!r}", squeeze)


def require_unique_names(names: Sequence[str]) -> None:
    """Makes sure that each metric, and the loss beside them, is given under a name of its own.

    Raises:
        SpecError: One is not.
    """
    double = sorted({name for name in names if names.count(name) > 1 or name == "loss"})
    if double:
        raise SpecError(
            f"metrics: more than one result would be called {', '.join(double)} (the loss is always"
            " given as `loss`). Give one of them another name: the option `name`, or a callable of"
            " your own."
        )


def require_predictions(metrics: Sequence[Any], predictions: Any) -> None:
    """Makes sure that metrics, where there are any, get predictions.

    Raises:
        SpecError: There are metrics, and an objective that gave no predictions.
    """
    if metrics and predictions is None:
        raise SpecError(
            "metrics: they need predictions, and the objective gave losses only. Let it return the"
            " pair (losses, predictions), or leave the metrics out."
        )
