"""The registers that plugins fill: names to backends, strategies, launchers and so on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.cluster_environment import ClusterEnvironment
from isotrain.core.contracts.launcher import Launcher
from isotrain.core.contracts.logger import Logger
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import IsotrainError, PluginError, unknown_name
from isotrain.core.spec import import_strings

T = TypeVar("T")


class Registry(Generic[T]):
    """What a registration hook receives: names to implementations of one kind."""

    def __init__(self, kind: str, base: type[T]) -> None:
        self._kind = kind
        self._base = base
        self._entries: dict[str, Any] = {}

    @property
    def contract(self) -> type[T]:
        """The class that every implementation is a subclass of."""
        return self._base

    def add(self, implementation: Any, *, name: str | None = None, replace: bool = False) -> None:
        """Registers an implementation.

        Args:
            implementation: A subclass of the kind's contract, or `"package.module:Class"`, imported on
                first use.
            name: Under which to register it; a class has its own name, a reference must be given one.
            replace: Take the place of what is registered under that name.

        Raises:
            PluginError: The name is missing, or taken and `replace` is not set; or the implementation
                does not fulfil the contract.
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
                f" {self._entries[chosen]!r}. Choose another, or pass replace=True to take its place."
            )
        self._entries[chosen] = implementation

    def entries(self) -> dict[str, Any]:
        """What is registered now, by name; a copy."""
        return dict(self._entries)

    def restore(self, entries: Mapping[str, Any]) -> None:
        """Goes back to what `entries` gave."""
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """All names, in the order of registration."""
        return list(self._entries)

    def get(self, name: str) -> type[T]:
        """Returns the implementation of that name, importing it if need be.

        Raises:
            IsotrainError: There is none.
            PluginError: It does not fulfil the contract.
        """
        found = import_strings.resolve(self._entry(name))
        self._check(found, name)
        implementation: type[T] = found
        return implementation

    def _entry(self, name: str) -> Any:
        if name not in self._entries:
            raise IsotrainError(unknown_name(self._kind, name, self._entries))
        return self._entries[name]

    def _check(self, found: Any, name: str) -> None:
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise PluginError(
                f"the {self._kind} {name!r} is {found!r}; expected a subclass of"
                f" {self._base.__module__}.{self._base.__qualname__}."
            )


class BackendRegistry(Registry[Adapter]):
    """Receives backends."""

    def __init__(self) -> None:
        super().__init__("backend", Adapter)  # type: ignore[type-abstract]


class StrategyRegistry(Registry[Strategy]):
    """Receives strategies."""

    def __init__(self) -> None:
        super().__init__("strategy", Strategy)  # type: ignore[type-abstract]


class LauncherRegistry(Registry[Launcher]):
    """Receives launchers."""

    def __init__(self) -> None:
        super().__init__("launcher", Launcher)  # type: ignore[type-abstract]


class EnvironmentRegistry(Registry[ClusterEnvironment]):
    """Receives environments."""

    def __init__(self) -> None:
        super().__init__("environment", ClusterEnvironment)  # type: ignore[type-abstract]


class LoggerRegistry(Registry[Logger]):
    """Receives loggers."""

    def __init__(self) -> None:
        super().__init__("logger", Logger)


class ModelRegistry(Registry[Any]):
    """Receives models: what a spec's `model` may be, under a name that stands for it."""

    def __init__(self) -> None:
        super().__init__("model", object)

    def get(self, name: str) -> Any:
        """Returns what is registered: a builder, its reference, or a table of these by framework.

        Raises:
            IsotrainError: There is none.
        """
        return self._entry(name)

    def _check(self, found: Any, name: str) -> None:
        builders = list(found.values()) if isinstance(found, Mapping) else [found]
        if not builders or not all(isinstance(b, str) or callable(b) for b in builders):
            raise PluginError(
                f"the model {name!r} is {found!r}; expected a callable that builds it,"
                f" {import_strings.SYNTAX}, or a table {{framework: one of these}}."
            )


REGISTRIES: Mapping[str, Callable[[], Registry[Any]]] = {
    "backends": BackendRegistry,
    "strategies": StrategyRegistry,
    "launchers": LauncherRegistry,
    "environments": EnvironmentRegistry,
    "models": ModelRegistry,
    "loggers": LoggerRegistry,
}
"""Every kind of thing that plugins register, and what receives it."""
