"""Python state that a call of a model may change, and that the recorded operations of one call would freeze.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from isotrain.adapters.common.object_walk import (
    is_user_class,
    is_user_object,
    iter_nested,
    set_by_path,
)
from isotrain.adapters.keras.carried_state import base_layer_attributes

_NUMBERS = (int, float, complex)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MAX_DEFINITIONS = 1024
"""Number of classes and functions whose values are compared."""


class _Namespace(NamedTuple):
    """Names with values: attributes of an object or a class, or what a function refers to.

    Attributes:
        label: What messages call it.
        read: Function that returns its values by name.
        write: Function that sets a name to a value.
    """

    label: str
    read: Callable[[], dict[str, Any]]
    write: Callable[[str, Any], None]


class CallState:
    """Numbers and random generators in attributes, class attributes, globals and closures, at any depth.

    They are those of layers whose class is the user's, and of the user's functions.
    """

    def __init__(self, layers: Iterable[Any], functions: Iterable[Any]) -> None:
        """Takes a snapshot.

        Args:
            layers: Layers or modules of a model.
            functions: Losses, an objective or metrics, which are called too.
        """
        owners = [layer for layer in layers if is_user_class(type(layer))]
        self._owner_ids = {id(each) for owner in owners for each in (owner, vars(owner))}
        self._namespaces = list(_namespaces(owners, functions))
        self._before = self._contents()

    def iterators(self) -> list[str]:
        """Iterators and generators of Python, which a call may advance."""
        found = self._values(
            lambda value: hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
        )
        return [self._described(key) for key, _ in found]

    def changes(self) -> list[str]:
        """Numbers and generators that differ from the snapshot, by namespace and path."""
        return list(map(self._described, self._differing()))

    def restore(self) -> None:
        """Gives numbers and generators their values of the snapshot."""
        for index, path in self._differing():
            namespace, before = self._namespaces[index], self._before[index, path]
            if isinstance(before, _GeneratorState):
                before.restore()
                continue
            values = namespace.read()
            changed = dict(values)
            set_by_path(changed, path, before)
            for name, value in changed.items():
                if value is not values[name]:
                    namespace.write(name, value)

    def _described(self, key: tuple[int, str]) -> str:
        index, path = key
        return f"{self._namespaces[index].label}: {path}"

    def _differing(self) -> list[tuple[int, str]]:
        now = self._contents()
        return [
            key
            for key, before in self._before.items()
            if key in now and before is not now[key] and before != now[key]
        ]

    def _contents(self) -> dict[tuple[int, str], Any]:
        """Numbers, and states of generators, by index of their namespace and path."""
        kinds = (*_NUMBERS, *_GENERATORS)
        return {
            key: _GeneratorState(value) if isinstance(value, _GENERATORS) else value
            for key, value in self._values(lambda value: isinstance(value, kinds))
        }

    def _values(self, is_meant: Callable[[Any], bool]) -> Iterator[tuple[tuple[int, str], Any]]:
        visited = set(self._owner_ids)
        for index, namespace in enumerate(self._namespaces):
            for name, value in namespace.read().items():
                for path, found in iter_nested(name, value, is_meant, visited):
                    if isinstance(found, _NUMBERS) or id(found) not in visited:
                        visited.add(id(found))
                        yield (index, path), found


class _GeneratorState:
    """State of a random generator of Python or NumPy, which may be restored."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._state = copy.deepcopy(self._read())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GeneratorState) and repr(self._state) == repr(other._state)

    __hash__ = None  # type: ignore[assignment]

    def _read(self) -> Any:
        if isinstance(self._generator, random.Random):
            return self._generator.getstate()
        if isinstance(self._generator, np.random.RandomState):
            return self._generator.get_state(legacy=False)
        return self._generator.bit_generator.state

    def restore(self) -> None:
        """Sets the generator to this state."""
        if isinstance(self._generator, random.Random):
            self._generator.setstate(self._state)
        elif isinstance(self._generator, np.random.RandomState):
            self._generator.set_state(self._state)
        else:
            self._generator.bit_generator.state = self._state


def _namespaces(owners: Iterable[Any], functions: Iterable[Any]) -> Iterator[_Namespace]:
    """Namespaces of layers, and of all classes and functions of the user that their code leads to."""
    base_attributes = base_layer_attributes()
    pending: deque[Any] = deque()
    for owner in owners:
        yield _of_object(owner, base_attributes)
        pending += [each for each in type(owner).__mro__ if is_user_class(each)]
    for function in map(inspect.unwrap, functions):
        if is_user_object(function) and not inspect.isroutine(function):
            yield _of_object(function, base_attributes)
        pending += _parts(function)
    visited: set[int] = set()
    while pending and len(visited) < _MAX_DEFINITIONS:
        definition = pending.popleft()
        if id(definition) in visited:
            continue
        visited.add(id(definition))
        namespace = _of_class(definition) if isinstance(definition, type) else _of(definition)
        yield namespace
        pending += [part for value in namespace.read().values() for part in _parts(value)]


def _parts(value: Any) -> list[Any]:
    """Classes and functions of the user that calling a value may run, outermost first."""
    if isinstance(value, functools.partial):
        return _parts(value.func)
    if isinstance(value, staticmethod | classmethod) or inspect.ismethod(value):
        return _parts(value.__func__)
    if isinstance(value, property):
        return _parts(value.fget)
    if inspect.isfunction(value) or isinstance(value, type):
        return [value] if value.__module__ and is_user_class(value) else []
    return [type(value)] if is_user_object(value) else []


def _of_object(owner: Any, base_attributes: Collection[str]) -> _Namespace:
    def read() -> dict[str, Any]:
        items = vars(owner).items()
        return {name: value for name, value in items if name not in base_attributes}

    name = getattr(owner, "name", None)
    kind = type(owner).__name__
    return _Namespace(f"{name} ({kind})" if name else kind, read, vars(owner).__setitem__)


def _of_class(kind: type) -> _Namespace:
    return _Namespace(kind.__name__, lambda: dict(vars(kind)), functools.partial(setattr, kind))


def _of(function: Any) -> _Namespace:
    """Names that a function refers to: globals, and variables of functions around it."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    names = _names_in(function.__code__) - cells.keys()
    variables = function.__globals__

    def read() -> dict[str, Any]:
        found = {name: variables[name] for name in names if name in variables}
        for name, cell in cells.items():
            with contextlib.suppress(ValueError):  # it is empty
                found[name] = cell.cell_contents
        return found

    def write(name: str, value: Any) -> None:
        if name in cells:
            cells[name].cell_contents = value
        else:
            variables[name] = value

    return _Namespace(function.__qualname__, read, write)


def _names_in(code: CodeType) -> set[str]:
    """Names that code refers to, functions inside it included."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))
