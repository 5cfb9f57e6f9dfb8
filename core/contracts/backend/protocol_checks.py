"""Checks that classes of plugins have the methods of a contract, with errors that say what these are for."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self, TypeVar

from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.errors import PluginError, UnsupportedError

P = TypeVar("P")


class Contract(ABC):  # noqa: B024  # its subclasses have abstract methods
    """Base of contracts whose instances only processes of a run create: names all missing methods at once."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Creates an instance.

        Raises:
            PluginError: The class lacks abstract methods.
        """
        if missing := sorted(cls.__abstractmethods__):
            raise PluginError(
                f"{cls.__module__}.{cls.__qualname__} lacks {describe_methods(cls, missing)}."
            )
        return super().__new__(cls)


def methods_of(protocol: type) -> list[str]:
    """Names of a protocol's public methods."""
    return [name for name, value in vars(protocol).items() if _is_method(name, value)]


def _is_method(name: str, value: Any) -> bool:
    return inspect.isfunction(value) and not name.startswith("_")


def missing_methods(implementation: object, protocol: type) -> list[str]:
    """Methods of a protocol that a class or an object does not have, or has only by inheriting from it."""

    def is_missing(name: str) -> bool:
        method = getattr(implementation, name, None)
        return not callable(method) or getattr(method, "__func__", method) is vars(protocol)[name]

    return list(filter(is_missing, methods_of(protocol)))


def require_protocols(
    implementation: object,
    protocols: Mapping[type, frozenset[Capability]],
    declared: Collection[Capability],
    name: str,
) -> None:
    """Requires the methods of declared capabilities and of base classes; of each other protocol all or none.

    Args:
        implementation: Class or object.
        protocols: Protocol to the capabilities that need it.
        declared: Declared capabilities.
        name: What the implementation is called in an error.

    Raises:
        PluginError: Methods are missing.
    """
    bases = (implementation if isinstance(implementation, type) else type(implementation)).__mro__
    for protocol, capabilities in protocols.items():
        missing = missing_methods(implementation, protocol)
        needed = sorted(capabilities.intersection(declared))
        is_partial = protocol in bases or len(missing) < len(methods_of(protocol))
        if missing and (needed or is_partial):
            why = f"declares {', '.join(needed)}" if needed else f"is half a {protocol.__name__}"
            raise PluginError(f"{name} {why}, but lacks {describe_methods(protocol, missing)}.")


def describe_methods(contract: type, names: Iterable[str]) -> str:
    """Names of methods, each with the first line of its docstring in the contract."""
    return ", ".join(f"{name} ({_purpose(contract, name)})" for name in names)


def _purpose(contract: type, name: str) -> str:
    doc = inspect.getdoc(getattr(contract, name)) or ""
    return doc.partition("\n")[0].rstrip(".")


def require(implementation: object, protocol: type[P]) -> P:
    """An implementation that has the methods of a protocol.

    Raises:
        UnsupportedError: It lacks some.
    """
    if missing := missing_methods(implementation, protocol):
        raise UnsupportedError(
            f"{type(implementation).__name__} is no {protocol.__name__}: it lacks {', '.join(missing)}."
        )
    return implementation  # type: ignore[return-value]
