"""Resolves components of a spec (model, loss, metric, optimizer) to callables; imports no framework."""

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


def resolve_for_framework(entry: Any, framework: str, field: str) -> Any:
    """Picks this framework's entry where the spec gives one per framework, and imports it.

    Raises:
        SpecError: There is no entry for this framework, or it cannot be imported.
    """
    if isinstance(entry, Mapping):
        if framework not in entry:
            raise SpecError(
                f"{field}: no entry for the framework {framework!r}; available:"
                f" {', '.join(sorted(entry))}."
            )
        entry = entry[framework]
    return import_strings.resolve(entry)


def snake_case(name: str) -> str:
    """A class's name in snake case: `mean_squared_error`, `kl_divergence`."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def instantiate(make: Any, chosen: Component, field: str, **defaults: Any) -> Any:
    """Calls a class or function with the options of the spec.

    Args:
        make: Class or function to call.
        chosen: Component of the spec, which has the options.
        field: Field of the spec, for messages.
        defaults: Options for which the spec gives none.

    Raises:
        SpecError: The class or function refuses the options.
    """
    try:
        return make(**{**defaults, **chosen.options})
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"{field}: {chosen.label!r} refuses the options {chosen.options}: {error}"
        ) from error


def call_checked(form: str, make: Any, field: str, *given: Any, **options: Any) -> Any:
    """Calls a user's function after checking that it takes these arguments.

    Args:
        form: Form of the call, for messages.
        make: The function.
        field: Field of the spec, for messages.
        given: Positional arguments.
        options: Keyword arguments from the spec.

    Raises:
        SpecError: The function does not take them.
    """
    try:
        inspect.signature(make).bind(*given, **options)
    except TypeError as error:
        raise SpecError(
            f"{field}: {import_strings.describe(make)!r} cannot be called as {form}: {error}."
            " Its parameters are"
            f" {inspect.signature(make)}."
        ) from None
    except ValueError:  # a compiled function
        pass
    return make(*given, **options)


def names_option(make: Any, names: Sequence[str]) -> dict[str, list[str]]:
    """The option `names`, the names of the weights to optimize, for a function with a parameter `names`."""
    try:
        takes_names = "names" in inspect.signature(make).parameters
    except ValueError:  # a compiled function
        return {}
    return {"names": list(names)} if takes_names else {}


def name_option(cls: type) -> dict[str, str]:
    """The option `name` for a class that would number its instances instead: auc, auc_1, ..."""
    name = inspect.signature(cls).parameters.get("name")
    counts = name is not None and name.default is None
    return {"name": snake_case(cls.__name__)} if counts else {}


def build_custom(chosen: Component, field: str) -> Any:
    """A custom loss or metric with its options: an instance of a class, or a function."""
    factory = import_strings.resolve(chosen.name)
    if isinstance(factory, type):
        return instantiate(factory, chosen, field, **name_option(factory))
    return functools.partial(factory, **chosen.options) if chosen.options else factory


def as_function(
    function: Any, chosen: Component, field: str, *, squeeze: bool = True
) -> callables.Function:
    """A custom loss or metric as `function(targets, predictions)`.

    Args:
        function: Result of `build_custom`.
        chosen: Component of the spec.
        field: Field of the spec, for messages.
        squeeze: Whether to drop a last axis of length 1 that only one of targets and predictions has, as
            Keras' own losses do; otherwise such shapes are refused.
    """
    ordered = callables.targets_first(function, chosen.order, field)
    return callables.refusing_broadcast(ordered, f"{field}: {chosen.label!r}", squeeze)


def require_unique_names(names: Sequence[str]) -> None:
    """Refuses metrics of the same name, or of the name `loss`.

    Raises:
        SpecError: A name occurs twice, or is `loss`.
    """
    duplicates = sorted({name for name in names if names.count(name) > 1 or name == "loss"})
    if duplicates:
        raise SpecError(
            f"metrics: more than one result would be called {', '.join(duplicates)} (the loss is always"
            " given as `loss`). Give one of them another name: the option `name`, or a callable of"
            " your own."
        )


def require_predictions(metrics: Sequence[Any], predictions: Any) -> None:
    """Refuses metrics without predictions.

    Raises:
        SpecError: There are metrics that need them, and the objective returned no predictions.
    """
    if predictions is None and any(getattr(each, "needs_predictions", True) for each in metrics):
        raise SpecError(
            "metrics: they need predictions, and the objective gave losses only. Let it return the"
            " pair (losses, predictions), or leave the metrics out."
        )
