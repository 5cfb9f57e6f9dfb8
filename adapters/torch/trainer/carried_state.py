"""State that modules carry from one call to the next in plain attributes, not in parameters or buffers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
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
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class Carry:
    """Tensors and numbers in module attributes, and variables that are not weights.

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
        """Changed values by name: tensors in their shapes, numbers as scalars."""
        changed = dict(self.variables)
        for name, value in self._attributes():
            initial, version = self._initial.get(name, (None, None))
            if isinstance(value, torch.Tensor):
                if initial is not value or version != _version(value):
                    changed[name] = value.detach()
            elif type(initial) is not type(value) or initial != value:
                changed[name] = torch.tensor(
                    value, dtype=torch.float64 if type(value) is float else None
                )
        return changed

    def _write(self, name: str, value: torch.Tensor) -> None:
        """Restores one value, a tensor of its shape or a number.

        Raises:
            IsotrainError: The name belongs to no module.
        """
        if name in self.variables:
            overwrite(f"carry/{name}", self.variables[name], value)
            return
        present = dict(self._attributes()).get(name)
        if (
            isinstance(present, torch.Tensor)
            and present.shape == value.shape
            and not present.requires_grad
        ):
            present.copy_(value)
            return
        owners = [o for o in self._owners if not o or name.startswith(f"{o}.")]
        if not owners:
            raise IsotrainError(unknown_name("module", name.rpartition(".")[0], self._owners))
        owner = max(owners, key=len)
        restored: Any = value.to(self._device)
        if isinstance(present, bool | int | float):
            restored = type(present)(value.item())
        set_by_path(self._owners[owner], name[len(owner) :].removeprefix("."), restored)

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
        attributes = [(each, dict(each)) for each in self._owners.values()]
        containers = list(self._containers())
        tensors = [v for _, v in self._attributes() if isinstance(v, torch.Tensor)]
        tensors += self.variables.values()
        values = [tensor.detach().clone() for tensor in tensors]

        def restore() -> None:
            for each, before in attributes:
                _restore_attributes(each, before, self._ignored)
            for container, content in containers:
                _refill(container, content)
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    if not _equal_bits(tensor, value):
                        tensor.detach().copy_(value)

        return restore

    def _containers(self) -> Iterator[tuple[Any, Any]]:
        """Mutable containers in attributes, at any depth, each with a copy of its content."""
        containers: list[Any] = []

        def note(value: Any) -> bool:
            if isinstance(value, list | dict | set | deque):
                containers.append(value)
            return _is_carried(value)

        skipped = {*self._objects, *map(id, self._owners.values())}
        for attributes in self._owners.values():
            for name, value in attributes.items():
                if name not in self._ignored:
                    list(iter_nested(name, value, note, skipped))
        return ((each, each.copy()) for each in containers)


def _is_carried(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor or type(value) in _NUMBERS


def _version(value: Any) -> int | None:
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return private_api.version_of(value) if is_counted else None


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
