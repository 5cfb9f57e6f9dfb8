"""The registries that plugins fill: names to backends, strategies, launchers, environments and so on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.adapter_protocols import BACKEND_PROTOCOLS
from isotrain.core.contracts.backend.protocol_checks import describe_methods, require_protocols
from isotrain.core.contracts.cluster_environment import ClusterEnvironment
from isotrain.core.contracts.launcher import Launcher
from isotrain.core.contracts.logger import Logger
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import IsotrainError, PluginError, unknown_name
from isotrain.core.spec import import_strings

T = TypeVar("T")
_ATTRIBUTES = ("name", "framework", "summary", "collectives")
"""Attributes of adapters without a default."""


class Registry(Generic[T]):
    """Registry of the implementations of one kind, which a registration hook receives as `register`."""

    def __init__(self, kind: str, base: type[T]) -> None:
        """Starts empty.

        Args:
            kind: Name of the kind in messages, such as `strategy`.
            base: Contract that implementations must subclass.
        """
        self._kind = kind
        self._base = base
        self._entries: dict[str, Any] = {}

    @property
    def contract(self) -> type[T]:
        """Base class of all implementations."""
        return self._base

    def add(self, implementation: Any, *, name: str | None = None, replace: bool = False) -> None:
        """Registers an implementation.

        Args:
            implementation: Subclass of the contract, or `"package.module:Class"`, imported on first use.
            name: Name to register under; None: the class's attribute `name`. Required for references.
            replace: Whether to replace an implementation of the same name.

        Raises:
            PluginError: The name is missing, or taken and `replace` is false; or the implementation does not
                subclass the contract.
        """
        chosen = name or getattr(implementation, "name", None)
        if not isinstance(chosen, str):
            raise PluginError(
                f"registering a {self._kind}: {implementation!r} has no name; pass name=..."
            )
        if not isinstance(implementation, str):
            self._check(implementation, chosen)
        if chosen in self._entries and not replace:
            raise PluginError(
                f"registering a {self._kind}: the name {chosen!r} is taken by"
                f" {self._entries[chosen]!r}. Choose another, or pass replace=True to replace it."
            )
        self._entries[chosen] = implementation

    def entries(self) -> dict[str, Any]:
        """Copy of the registry: name to implementation or reference."""
        return dict(self._entries)

    def restore(self, entries: Mapping[str, Any]) -> None:
        """Restores an earlier result of `entries`."""
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """Names in the order of registration."""
        return list(self._entries)

    def get(self, name: str) -> type[T]:
        """Implementation of a name, imported if registered by reference.

        Raises:
            IsotrainError: The name is not registered.
            PluginError: The implementation does not subclass the contract.
        """
        implementation: type[T] = import_strings.resolve(self._entry(name))
        self._check(implementation, name)
        return implementation

    def _entry(self, name: str) -> Any:
        if name not in self._entries:
            from isotrain.core.spec.validation import OTHER_TOOLS_NAMES  # slow: only on an error

            called_here = OTHER_TOOLS_NAMES.get(name.lower())
            raise IsotrainError(
                unknown_name(self._kind, name, self._entries, called_here=called_here)
            )
        return self._entries[name]

    def _check(self, implementation: Any, name: str) -> None:
        if not (isinstance(implementation, type) and issubclass(implementation, self._base)):
            raise PluginError(
                f"the {self._kind} {name!r} is {implementation!r}; expected a subclass of"
                f" {self._base.__module__}.{self._base.__qualname__}."
            )
        if missing := sorted(getattr(implementation, "__abstractmethods__", ())):
            raise PluginError(
                f"the {self._kind} {name!r}, {implementation.__module__}.{implementation.__qualname__},"
                f" lacks {describe_methods(implementation, missing)}."
            )


class BackendRegistry(Registry[Adapter]):
    """Registry of backends."""

    def __init__(self) -> None:
        super().__init__("backend", Adapter)

    def _check(self, implementation: Any, name: str) -> None:
        super()._check(implementation, name)
        where = f"the backend {name!r}, {implementation.__module__}.{implementation.__qualname__},"
        if missing := [each for each in _ATTRIBUTES if not hasattr(implementation, each)]:
            raise PluginError(f"{where} lacks the attributes {', '.join(missing)}.")
        declared = {each for layout in implementation.capabilities.values() for each in layout.has}
        require_protocols(implementation, BACKEND_PROTOCOLS, declared, where)


class StrategyRegistry(Registry[Strategy]):
    """Registry of strategies."""

    def __init__(self) -> None:
        super().__init__("strategy", Strategy)


class LauncherRegistry(Registry[Launcher]):
    """Registry of launchers."""

    def __init__(self) -> None:
        super().__init__("launcher", Launcher)


class EnvironmentRegistry(Registry[ClusterEnvironment]):
    """Registry of cluster environments."""

    def __init__(self) -> None:
        super().__init__("environment", ClusterEnvironment)


class LoggerRegistry(Registry[Logger]):
    """Registry of loggers."""

    def __init__(self) -> None:
        super().__init__("logger", Logger)


class ModelRegistry(Registry[Any]):
    """Registry of model builders, which a spec's `model` may name."""

    def __init__(self) -> None:
        super().__init__("model", object)

    def get(self, name: str) -> Any:
        """Registered builder, its reference, or a table `{framework: builder or reference}`.

        Raises:
            IsotrainError: The name is not registered.
        """
        return self._entry(name)

    def _check(self, model: Any, name: str) -> None:
        builders = list(model.values()) if isinstance(model, Mapping) else [model]
        if not builders or not all(isinstance(each, str) or callable(each) for each in builders):
            raise PluginError(
                f"the model {name!r} is {model!r}; expected a callable that builds it,"
                f" {import_strings.SYNTAX}, or a table {{framework: one of these}}."
            )


class CallbackRegistry(Registry[Any]):
    """Registry of callbacks (objects, classes, functions or references), which a spec may name."""

    def __init__(self) -> None:
        super().__init__("callback", object)

    def get(self, name: str) -> Any:
        """Registered callback or its reference.

        Raises:
            IsotrainError: The name is not registered.
        """
        return self._entry(name)

    def _check(self, callback: Any, name: str) -> None:
        """Accepts any object: a run checks the methods of its callbacks."""


REGISTRIES: Mapping[str, Callable[[], Registry[Any]]] = {
    "backends": BackendRegistry,
    "strategies": StrategyRegistry,
    "launchers": LauncherRegistry,
    "environments": EnvironmentRegistry,
    "models": ModelRegistry,
    "loggers": LoggerRegistry,
    "callbacks": CallbackRegistry,
}
"""Kind of plugin to its registry class."""
