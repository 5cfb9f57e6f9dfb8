"""References of a stored spec, `spec.json`: looked up again by what a run has written of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from isotrain.core.errors import SpecError
from isotrain.core.spec import import_strings


def resolve_stored(field: str, reference: Any, where: str, remedy: str) -> Any:
    """A reference of a stored spec, or a table of such; of the running script as the callable itself.

    Args:
        field: Name of the spec field.
        reference: What the stored spec has.
        where: Location of the stored spec, for the error.
        remedy: What to do where it cannot be found, a sentence.

    Raises:
        SpecError: It cannot be found by its name, or there is no model.
    """
    if reference is None and field != "model":
        return None
    if isinstance(reference, Mapping):
        return {
            name: resolve_stored(field, each, where, remedy) for name, each in reference.items()
        }
    if is_unresolvable(reference):
        raise SpecError(
            f"{where}: the {field} was {reference!r}, which cannot be found again from its name. {remedy}"
        )
    return resolve_in_main(reference)


def resolve_in_main(reference: Any) -> Any:
    """Resolves an import string of the running script; returns anything else unchanged."""
    is_in_main = isinstance(reference, str) and reference.startswith("__main__:")
    return import_strings.resolve(reference) if is_in_main else reference


def is_unresolvable(stored: Any) -> bool:
    """Whether a stored spec value is a description of an object that cannot be imported by name."""
    if not isinstance(stored, str):
        return stored is None
    if stored.startswith("__main__:"):
        names = vars(sys.modules["__main__"])
        return stored.partition(":")[2].partition(".")[0] not in names or "<" in stored
    return stored.startswith("<") or "<locals>" in stored or "<lambda>" in stored
