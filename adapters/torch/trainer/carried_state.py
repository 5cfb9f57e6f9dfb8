"""State that modules carry from one call to the next in plain attributes, not in parameters or buffers."""

from __future__ import annotations

import contextlib
import json
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from isotrain.adapters.common.object_walk import is_user_object, iter_nested, set_by_path
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.tensors import overwrite
from isotrain.adapters.torch.trainer.state import Section
from isotrain.plugin import IsotrainError, unknown_name

_NUMBERS = {"bool": bool, "int": int, "float": float}
_ARRAY, _GENERATOR = "array", "generator"
"""With the names of numbers: ends of the names of values that are no tensors, after a colon."""
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState)
_CONTAINERS = (tuple, list, deque, dict, set)
_MOST_ARRAY_BYTES = 2**24
"""Bytes above which a NumPy array is taken for a constant: arrays are copied at each savepoint."""
_LONG = "gG"
"""Characters of NumPy's long floating-point types, which torch does not have."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class Carry:
    """Tensors, numbers, arrays and random generators in module attributes, and variables that are no weights.

    An attribute is state once its value differs from that of the freshly built model: constants are not
    copied into checkpoints.
    """

    def __init__(
        self,
        owners: Mapping[str, Any],
        variables: Mapping[str, torch.Tensor],
        device: torch.device,
        ignored: Collection[str] = _MODULE_ATTRIBUTES,
    ) -> None:
        """Notes the present values, which may have any shape.

        Args:
            owners: Modules or layers, by name.
            variables: Variables of the model that are not weights, by name; set in place.
            device: Device for tensors that come from a checkpoint.
            ignored: Names of attributes that every module has, which are not looked at.
        """
        self._owners = {name: vars(owner) for name, owner in owners.items()}
        self._objects = {id(owner) for owner in owners.values()}
        self.variables = variables
        self._device = device
        self._ignored = ignored
        self._initial = {name: (v, _version(v)) for name, v in self._attributes()}
        """Values of the freshly built model, each with its `_version`."""

    def section(self) -> Section:
        """The carried state as a section of named state."""
        return Section(self._read_changed, self._write)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        skipped = {*self._objects, *map(id, self._owners.values())}
        for owner, attributes in self._owners.items():
            for name, value in list(attributes.items()):
                if name not in self._ignored:
                    path = f"{owner}.{name}".removeprefix(".")
                    yield from iter_nested(path, value, _is_carried, skipped)

    def _read_changed(self) -> dict[str, torch.Tensor]:
        """Changed values by name: tensors and arrays in their shapes, numbers as scalars.

        The name of a value that is no tensor ends in its kind, such as `calls:int`.
        """
        changed = dict(self.variables)
        for name, value in self._attributes():
            initial, version = self._initial.get(name, (None, None))
            if type(value) in _NUMBERS.values():
                if type(initial) is not type(value) or initial != value:
                    dtype = torch.float64 if type(value) is float else None
                    changed[f"{name}:{type(value).__name__}"] = torch.tensor(value, dtype=dtype)
            elif initial is value and version == _version(value):
                continue
            elif isinstance(value, torch.Tensor):
                changed[name] = value.detach()
            elif isinstance(value, _RANDOM):
                state = np.frombuffer(_version(value), np.uint8)
                changed[f"{name}:{_GENERATOR}"] = torch.from_numpy(state.copy())
            else:
                array = np.array(value, value.dtype.newbyteorder("="))
                changed[f"{name}:{_ARRAY}"] = torch.from_numpy(array)
        return changed

    def _write(self, name: str, value: torch.Tensor) -> None:
        """Restores one value, a tensor of its shape or what its name ends in.

        Raises:
            IsotrainError: The name belongs to no module, or its random generator is gone.
        """
        if name in self.variables:
            overwrite(f"carry/{name}", self.variables[name], value)
            return
        path, kind = _path_and_kind(name)
        present: Any = dict(self._attributes()).get(path)
        if kind == _GENERATOR:
            if not isinstance(present, _RANDOM):
                raise IsotrainError(f"{path}: expected a random generator, received {present!r}.")
            _set_generator(present, bytes(value.tolist()))
            return
        if kind is None and _is_like(present, value) and not present.requires_grad:
            present.copy_(value)
            return
        owners = [o for o in self._owners if not o or path.startswith(f"{o}.")]
        if not owners:
            raise IsotrainError(unknown_name("module", path.rpartition(".")[0], self._owners))
        owner = max(owners, key=len)
        restored: Any = value.to(self._device)
        if kind == _ARRAY:
            array = value.cpu().numpy().copy()
            if _is_array_like(present, array):
                present[...] = array  # other attributes may be views of it
                return
            restored = array[()] if isinstance(present, np.generic) else array
        elif kind is not None:
            restored = _NUMBERS[kind](value.item())
        set_by_path(self._owners[owner], path[len(owner) :].removeprefix("."), restored)

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Context that restores variables, attributes and the content of containers at its end."""
        restore = self.savepoint()
        try:
            yield
        finally:
            restore()

    def savepoint(self) -> Callable[[], None]:
        """Copies variables, attributes and containers; returns a function that restores them in place."""
        containers, objects = self._containers()
        attributes = [(each, dict(each)) for each in (*self._owners.values(), *objects)]
        carried = [value for _, value in self._attributes()]
        tensors = [value for value in carried if isinstance(value, torch.Tensor)]
        tensors += self.variables.values()
        values = [tensor.detach().clone() for tensor in tensors]
        arrays = [(each, each.copy()) for each in carried if isinstance(each, np.ndarray)]
        states = [(each, _version(each)) for each in carried if isinstance(each, _RANDOM)]

        def restore() -> None:
            for each, before in attributes:
                _restore_attributes(each, before, self._ignored)
            for container, content in containers:
                _refill(container, content)
            for array, numbers in arrays:
                if array.flags.writeable:
                    array[...] = numbers
            for generator, state in states:
                _set_generator(generator, state)
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    if not _equal_bits(tensor, value):
                        tensor.detach().copy_(value)

        return restore

    def _containers(self) -> tuple[list[tuple[Any, Any]], list[dict[str, Any]]]:
        """Mutable containers in attributes, at any depth, with copies; and attributes of objects there."""
        containers: list[Any] = []
        objects: list[dict[str, Any]] = []

        def note(value: Any) -> bool:
            if isinstance(value, list | dict | set | deque):
                containers.append(value)
            elif is_user_object(value):
                objects.append(vars(value))
            return _is_carried(value)

        skipped = {*self._objects, *map(id, self._owners.values())}
        for attributes in self._owners.values():
            for name, value in attributes.items():
                if name not in self._ignored:
                    list(iter_nested(name, value, note, skipped))
        return [(each, each.copy()) for each in containers], objects


def _is_carried(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        is_small = value.nbytes <= _MOST_ARRAY_BYTES and not isinstance(value, np.memmap)
        return is_small and value.dtype.kind in "biufc" and value.dtype.char not in _LONG
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor or type(value) in _NUMBERS.values() or isinstance(value, _RANDOM)


def _version(value: Any) -> Any:
    """Mark that changes if a value is changed in place; of a random generator, its state as JSON."""
    if isinstance(value, _RANDOM):
        state: Any
        if isinstance(value, random.Random):
            state = value.getstate()
        elif isinstance(value, np.random.RandomState):
            state = value.get_state(legacy=False)
        else:
            state = value.bit_generator.state
        return json.dumps(state, default=np.ndarray.tolist).encode()
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, hash(value.tobytes())
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return private_api.version_of(value) if is_counted else None


def _set_generator(generator: Any, state: bytes) -> None:
    """Sets a random generator to a state that `_version` has given."""
    values = json.loads(state)
    if isinstance(generator, random.Random):
        version, words, gauss = values
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(values)
    else:
        generator.bit_generator.state = values


def _path_and_kind(name: str) -> tuple[str, str | None]:
    """Path of a value, and the kind that ends its name; None for a tensor."""
    path, _, kind = name.rpartition(":")
    return (path, kind) if kind in (*_NUMBERS, _ARRAY, _GENERATOR) and path else (name, None)


def _is_like(present: Any, value: torch.Tensor) -> bool:
    """Whether a present value is a tensor of the shape and dtype of another one."""
    is_tensor = isinstance(present, torch.Tensor)
    return is_tensor and present.shape == value.shape and present.dtype == value.dtype


def _is_array_like(present: Any, array: np.ndarray) -> bool:
    """Whether a present value is a writable array of the shape and dtype of another one."""
    is_writable = isinstance(present, np.ndarray) and present.flags.writeable
    return is_writable and present.shape == array.shape and present.dtype == array.dtype


def _equal_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one shape and equal values."""
    return tensor.shape == other.shape and torch.equal(tensor.detach(), other)


def _is_state(value: Any) -> bool:
    return value is None or _is_carried(value) or isinstance(value, _CONTAINERS)


def _restore_attributes(
    attributes: dict[str, Any], before: dict[str, Any], ignored: Collection[str]
) -> None:
    """Restores attributes in place where both the old and the new value can be carried state."""
    for name in [n for n in attributes if n not in ignored and n not in before]:
        if _is_state(attributes[name]):
            del attributes[name]
    for name, value in before.items():
        now = attributes.get(name)
        if name not in ignored and now is not value and _is_state(value) and _is_state(now):
            attributes[name] = value


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, dict | set):
        kind: Any = dict if isinstance(container, dict) else set
        kind.clear(container)
        kind.update(container, content)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), content)
    else:
        container.clear()
        container.extend(content)
