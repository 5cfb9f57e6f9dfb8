"""What modules carry from one call to the next, and is neither parameter nor buffer."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from isotrain.adapters.common.object_walk import iter_nested, set_by_path
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.tensors import overwrite
from isotrain.adapters.torch.trainer.state import Section
from isotrain.plugin import IsotrainError, unknown_name

_NUMBERS = (bool, int, float)
_CONTAINERS = (tuple, list, deque, dict, set)
_USUAL = frozenset(vars(nn.Module()))


class Carry:
    """Tensors and numbers in attributes of modules, and variables that no list of weights has.

    An attribute counts from the moment on at which it is another than when the model was built: constants
    are not copied into checkpoints.
    """

    def __init__(
        self,
        owners: Mapping[str, Any],
        variables: Mapping[str, torch.Tensor],
        device: torch.device,
        usual: Collection[str] = _USUAL,
    ) -> None:
        """Notes what there is.

        Args:
            owners: Modules or layers, by name.
            variables: The model's variables that are no weights, by name; set in place.
            device: Where tensors are put that come from a checkpoint.
            usual: Names of attributes that all owners have, which are not looked at.
        """
        self._owners = {name: vars(owner) for name, owner in owners.items()}
        self._objects = {id(owner) for owner in owners.values()}
        self.variables = variables
        self._device = device
        self._usual = usual
        self._first = {name: (v, _version(v)) for name, v in self._attributes()}

    def section(self) -> Section:
        """As named state."""
        return Section(self._read, self._write)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        known = {*self._objects, *map(id, self._owners.values())}
        for owner, attributes in self._owners.items():
            for name, value in list(attributes.items()):
                if name not in self._usual:
                    path = f"{owner}.{name}".removeprefix(".")
                    yield from iter_nested(path, value, _is_carried, known)

    def _read(self) -> dict[str, torch.Tensor]:
        found = dict(self.variables)
        for name, value in self._attributes():
            first, version = self._first.get(name, (None, None))
            if isinstance(value, torch.Tensor):
                if first is not value or version != _version(value):
                    found[name] = value.detach()
            elif type(first) is not type(value) or first != value:
                found[name] = torch.tensor(
                    value, dtype=torch.float64 if type(value) is float else None
                )
        return found

    def _write(self, name: str, value: torch.Tensor) -> None:
        if name in self.variables:
            overwrite(f"carry/{name}", self.variables[name], value)
            return
        held = dict(self._attributes()).get(name)
        if isinstance(held, torch.Tensor) and held.shape == value.shape and not held.requires_grad:
            held.copy_(value)
            return
        owners = [o for o in self._owners if not o or name.startswith(f"{o}.")]
        if not owners:
            raise IsotrainError(unknown_name("module", name.rpartition(".")[0], self._owners))
        owner = max(owners, key=len)
        given: Any = value.to(self._device)
        if isinstance(held, bool | int | float):
            given = type(held)(value.item())
        set_by_path(self._owners[owner], name[len(owner) :].removeprefix("."), given)

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Gives variables and attributes back at its end what they were and held."""
        attributes = [(held, dict(held)) for held in self._owners.values()]
        containers = list(self._containers())
        tensors = [v for _, v in self._attributes() if isinstance(v, torch.Tensor)]
        tensors += self.variables.values()
        values = [tensor.detach().clone() for tensor in tensors]
        try:
            yield
        finally:
            for held, before in attributes:
                _put_back(held, before, self._usual)
            for container, content in containers:
                _refill(container, content)
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    if not _equal_bits(tensor, value):
                        tensor.detach().copy_(value)

    def _containers(self) -> Iterator[tuple[Any, Any]]:
        """What can be changed in place behind attributes, and a copy of what it holds."""
        found: list[Any] = []

        def note(value: Any) -> bool:
            if isinstance(value, list | dict | set | deque):
                found.append(value)
            return _is_carried(value)

        known = {*self._objects, *map(id, self._owners.values())}
        for attributes in self._owners.values():
            for name, value in attributes.items():
                if name not in self._usual:
                    list(iter_nested(name, value, note, known))
        return ((each, each.copy()) for each in found)


def _is_carried(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor or type(value) in _NUMBERS


def _version(value: Any) -> int | None:
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return private_api.version_of(value) if is_counted else None


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.detach(), other)


def _is_state(value: Any) -> bool:
    return value is None or _is_carried(value) or isinstance(value, _CONTAINERS)


def _put_back(held: dict[str, Any], before: dict[str, Any], usual: Collection[str]) -> None:
    """Gives attributes what they were, where both are of a kind that calls carry on."""
    for name in [n for n in held if n not in usual and n not in before]:
        if _is_state(held[name]):
            del held[name]
    for name, value in before.items():
        now = held.get(name)
        if name not in usual and now is not value and _is_state(value) and _is_state(now):
            held[name] = value


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
