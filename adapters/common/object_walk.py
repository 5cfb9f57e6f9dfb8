"""What objects keep in their attributes, at any depth; imports no framework."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from isotrain.plugin import IsotrainError

MAX_ENTRIES = 1024
"""Entries of a container that is not looked into, such as a vocabulary."""
_LIBRARIES = {"keras", "torch", "numpy", "tensorflow", "isotrain", *sys.stdlib_module_names}
_OPENING = {tuple: "(", list: "[", deque: "<", dict: "{"}
_STEP = re.compile(r"\.([^.(\[<{]+)|\((\d+)\)|\[(\d+)\]|<(\d+)>|\{([^}]*)\}")


def iter_nested(
    name: str, value: Any, is_meant: Callable[[Any], bool], known: set[int]
) -> Iterator[tuple[str, Any]]:
    """Finds values behind an attribute, with their paths: `hidden`, `hidden(0)`, `queues{left}[2]`.

    Args:
        name: The attribute's name.
        value: The attribute's value.
        is_meant: Tells which values are looked for.
        known: Identities of what is not looked into (again); grows.
    """
    if is_meant(value):
        yield name, value
        return
    if id(value) in known:
        return
    for step, part in _parts(value):
        known.add(id(value))
        yield from iter_nested(name + step, part, is_meant, known)


def _parts(value: Any) -> list[tuple[str, Any]]:
    kind = next((each for each in _OPENING if isinstance(value, each)), None)
    if kind is None:
        return [(f".{n}", v) for n, v in vars(value).items()] if is_user_object(value) else []
    if len(value) > MAX_ENTRIES:
        return []
    if kind is dict:
        return [(f"{{{key}}}", part) for key, part in value.items() if isinstance(key, str)]
    opening, closing = _OPENING[kind], {"(": ")", "[": "]", "<": ">"}[_OPENING[kind]]
    return [(f"{opening}{index}{closing}", part) for index, part in enumerate(value)]


def is_user_object(value: Any) -> bool:
    """Whether it is an object of a class that is no library's."""
    is_object = hasattr(value, "__dict__") and not isinstance(value, type)
    return is_object and is_user_class(type(value))


def is_user_class(kind: type) -> bool:
    """Whether a class is no library's."""
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def set_by_path(attributes: dict[str, Any], path: str, value: Any) -> None:
    """Sets what is behind an attribute; makes containers that are not there yet.

    Args:
        attributes: The object's attributes by name.
        path: As `iter_nested` gives it.
        value: What to put there.

    Raises:
        IsotrainError: What is there now has no such place.
    """
    steps = list(_STEP.finditer(f".{path}"))
    if not steps or "".join(step.group() for step in steps) != f".{path}":
        raise IsotrainError(
            f"expected the path of an attribute, such as `hidden(0)`, received {path!r}."
        )
    name = steps[0].group(1)
    attributes[name] = _with(attributes.get(name), steps[1:], value, path)


def _with(held: Any, steps: list[re.Match[str]], value: Any, path: str) -> Any:
    """A value, of which something inside is set."""
    if not steps:
        return value
    first, rest = steps[0], steps[1:]
    attribute, *places, key = first.groups()
    if attribute is not None:
        if not is_user_object(held):
            raise IsotrainError(f"{path}: there is no object to have the attribute {attribute!r}.")
        vars(held)[attribute] = _with(vars(held).get(attribute), rest, value, path)
        return held
    if key is not None:
        found = held if isinstance(held, dict) else {}
        found[key] = _with(found.get(key), rest, value, path)
        return found
    kind = (tuple, list, deque)[next(i for i, each in enumerate(places) if each is not None)]
    index = int(next(each for each in places if each is not None))
    items = list(held) if isinstance(held, kind) else []
    items += [None] * (index + 1 - len(items))
    items[index] = _with(items[index], rest, value, path)
    if kind is tuple:
        return type(held)(*items) if hasattr(held, "_fields") else tuple(items)
    if not isinstance(held, list | deque) or not isinstance(held, kind):
        return kind(items)
    held.clear()
    held.extend(items)
    return held
