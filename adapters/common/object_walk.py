"""Walks objects' attributes at any depth; imports no framework."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from isotrain.plugin import IsotrainError

MAX_ENTRIES = 1024
"""Containers with more entries, such as a vocabulary, are not visited."""
_LIBRARIES = {"keras", "torch", "numpy", "tensorflow", "isotrain", *sys.stdlib_module_names}
_OPENING = {tuple: "(", list: "[", deque: "<", dict: "{"}
_STEP = re.compile(r"\.([^.(\[<{]+)|\((\d+)\)|\[(\d+)\]|<(\d+)>|\{([^}]*)\}")


def iter_nested(
    name: str, value: Any, is_meant: Callable[[Any], bool], visited: set[int]
) -> Iterator[tuple[str, Any]]:
    """Finds values behind an attribute, with their paths: `hidden`, `hidden(0)`, `queues{left}[2]`.

    Args:
        name: The attribute's name.
        value: The attribute's value.
        is_meant: Whether a value is one to find.
        visited: Identities of objects not to visit (again); grows.
    """
    if is_meant(value):
        yield name, value
        return
    if id(value) in visited:
        return
    for step, part in _parts(value):
        visited.add(id(value))
        yield from iter_nested(name + step, part, is_meant, visited)


def _parts(value: Any) -> list[tuple[str, Any]]:
    kind = next((each for each in _OPENING if isinstance(value, each)), None)
    if kind is None:
        return (
            [(f".{name}", attribute) for name, attribute in vars(value).items()]
            if is_user_object(value)
            else []
        )
    if len(value) > MAX_ENTRIES:
        return []
    if kind is dict:
        return [(f"{{{key}}}", part) for key, part in value.items() if isinstance(key, str)]
    opening, closing = _OPENING[kind], {"(": ")", "[": "]", "<": ">"}[_OPENING[kind]]
    return [(f"{opening}{index}{closing}", part) for index, part in enumerate(value)]


def is_user_object(value: Any) -> bool:
    """Whether a value is an object of a class that belongs to no library."""
    is_object = hasattr(value, "__dict__") and not isinstance(value, type)
    return is_object and is_user_class(type(value))


def is_user_class(kind: type | FunctionType) -> bool:
    """Whether a class, or a function, belongs to no library."""
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def set_by_path(attributes: dict[str, Any], path: str, value: Any) -> None:
    """Sets a value behind an attribute; makes containers that are missing.

    Args:
        attributes: The object's attributes by name.
        path: Path as `iter_nested` gives it.
        value: Value to set.

    Raises:
        IsotrainError: The path is malformed, or leads through a missing object.
    """
    steps = list(_STEP.finditer(f".{path}"))
    if not steps or "".join(step.group() for step in steps) != f".{path}":
        raise IsotrainError(
            f"expected the path of an attribute, such as `hidden(0)`, received {path!r}."
        )
    name = steps[0].group(1)
    attributes[name] = _with_value(attributes.get(name), steps[1:], value, path)


def _with_value(container: Any, steps: list[re.Match[str]], value: Any, path: str) -> Any:
    """A container or object in which the value behind these steps is set."""
    if not steps:
        return value
    first, rest = steps[0], steps[1:]
    attribute, *indices, key = first.groups()
    if attribute is not None:
        if not is_user_object(container):
            raise IsotrainError(f"{path}: found no object with the attribute {attribute!r}.")
        vars(container)[attribute] = _with_value(vars(container).get(attribute), rest, value, path)
        return container
    if key is not None:
        entries = container if isinstance(container, dict) else {}
        entries[key] = _with_value(entries.get(key), rest, value, path)
        return entries
    kind = (tuple, list, deque)[
        next(index for index, each in enumerate(indices) if each is not None)
    ]
    index = int(next(each for each in indices if each is not None))
    items = list(container) if isinstance(container, kind) else []
    items += [None] * (index + 1 - len(items))
    items[index] = _with_value(items[index], rest, value, path)
    if kind is tuple:
        return type(container)(*items) if hasattr(container, "_fields") else tuple(items)
    if not isinstance(container, list | deque) or not isinstance(container, kind):
        return kind(items)
    container.clear()
    container.extend(items)
    return container
