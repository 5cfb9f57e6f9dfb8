"""The plugin host: who offers which backend and strategy, under which name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, Generic, TypeVar

import pluggy

from isotrain.core import hookspecs, references
from isotrain.core.adapter import Adapter
from isotrain.core.errors import IsotrainError, PluginError, unknown_name
from isotrain.core.strategy import Strategy

T = TypeVar("T")
BUILTINS = ("isotrain.adapters.builtin", "isotrain.strategies.builtin")
"""The modules of this package that implement the registration hooks."""
PLUGINS_VARIABLE = "ISOTRAIN_PLUGINS"
"""Further plugin modules, separated by commas; the processes of a run inherit it."""


class Register(Generic[T]):
    """What a registration hook receives: names to implementations of one kind."""

    def __init__(self, kind: str, base: type[T]) -> None:
        self._kind = kind
        self._base = base
        self._entries: dict[str, Any] = {}

    def add(self, implementation: Any, *, name: str | None = None, replace: bool = False) -> None:
        """Registers an implementation.

        Args:
            implementation: A subclass of the kind's contract, or `"package.module:Class"`, imported on
                first use.
            name: Under which to register it; a class has its own name, a reference must be given one.
            replace: Take the place of what is registered under that name.

        Raises:
            PluginError: The name is missing, or taken and `replace` is not set.
        """
        chosen = name or getattr(implementation, "name", None)
        if not isinstance(chosen, str):
            raise PluginError(
                f"registering a {self._kind}: {implementation!r} has no name; pass name=..."
            )
        if chosen in self._entries and not replace:
            raise PluginError(
                f"registering a {self._kind}: the name {chosen!r} is taken by"
                f" {self._entries[chosen]!r}. Choose another, or pass replace=True to take its place."
            )
        self._entries[chosen] = implementation

    def copy_of_entries(self) -> dict[str, Any]:
        """What is registered now, for `restore`."""
        return dict(self._entries)

    def restore(self, entries: Mapping[str, Any]) -> None:
        """Goes back to what `copy_of_entries` gave."""
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
        if name not in self._entries:
            raise IsotrainError(unknown_name(self._kind, name, self._entries))
        found = references.resolve(self._entries[name])
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise PluginError(
                f"the {self._kind} {name!r} is {found!r}; expected a subclass of"
                f" {self._base.__module__}.{self._base.__qualname__}."
            )
        return found


class BackendRegister(Register[Adapter]):
    """Receives backends."""

    def __init__(self) -> None:
        super().__init__("backend", Adapter)  # type: ignore[type-abstract]


class StrategyRegister(Register[Strategy]):
    """Receives strategies."""

    def __init__(self) -> None:
        super().__init__("strategy", Strategy)  # type: ignore[type-abstract]


class PluginHost:
    """Loads plugins and holds what they registered.

    Attributes:
        faults: Plugin name to what is wrong with it; such plugins are left out.
    """

    def __init__(self, *, entry_points: bool = True) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.faults: dict[str, str] = {}
        self.backends = BackendRegister()
        self.strategies = StrategyRegister()
        for module in BUILTINS:
            self.add(importlib.import_module(module), name=module)
        for module in _modules_asked_for():
            self.add(_imported(module), name=module)
        if entry_points:
            self._load_entry_points()

    def tell(self, hook: str, **facts: Any) -> None:
        """Calls an event hook on every plugin; one that raises is warned about and passed over."""
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            given = {name: facts[name] for name in implementation.argnames}
            try:
                implementation.function(**given)
            except Exception as error:  # a plugin may raise anything
                warnings.warn(
                    f"plugin {implementation.plugin_name!r}, {hook}: {type(error).__name__}: {error}",
                    stacklevel=2,
                )

    def add(self, plugin: object, *, name: str | None = None) -> None:
        """Adds one plugin and lets it register.

        Raises:
            PluginError: It is broken: a misspelled hook, a taken name, an exception.
        """
        registers = self._registrations()
        before = {hook: register.copy_of_entries() for hook, register in registers.items()}
        label = self._manager.register(plugin, name)
        try:
            self._manager.check_pending()
            for hook, register in registers.items():
                implementation = getattr(plugin, hook, None)
                if implementation is not None:
                    implementation(register=register)
        except Exception as error:
            self._manager.unregister(plugin)
            for hook, register in registers.items():
                register.restore(before[hook])
            raise PluginError(f"plugin {label!r}: {error}") from error

    def _registrations(self) -> Mapping[str, Register[Any]]:
        return {
            "isotrain_register_backends": self.backends,
            "isotrain_register_strategies": self.strategies,
        }

    def _load_entry_points(self) -> None:
        """Adds every installed third-party plugin; a broken one is kept in `faults`."""
        for entry in metadata.entry_points(group=hookspecs.PROJECT):
            try:
                self.add(entry.load(), name=entry.name)
            except Exception as error:  # a plugin may raise anything while it is imported
                self.faults[entry.name] = f"{type(error).__name__}: {error}"

    def backend(self, name: str) -> Adapter:
        """Makes the adapter of that name.

        Raises:
            IsotrainError: There is no such backend.
        """
        with self._naming_faults():
            return self.backends.get(name)()

    @contextlib.contextmanager
    def _naming_faults(self) -> Iterator[None]:
        """Adds to an error which plugins were left out: what is missing may be theirs."""
        try:
            yield
        except IsotrainError as error:
            if self.faults:
                left_out = "; ".join(f"{name} ({fault})" for name, fault in self.faults.items())
                error.args = (f"{error} Plugins that were left out: {left_out}.",)
            raise

    def strategy(self, name: str, options: Mapping[str, Any]) -> Strategy:
        """Makes the strategy of that name.

        Raises:
            IsotrainError: There is no such strategy, or it refuses the options.
        """
        with self._naming_faults():
            factory: Callable[..., Strategy] = self.strategies.get(name)
        try:
            return factory(**options)
        except TypeError as error:
            raise IsotrainError(
                f"strategy {name!r} does not take the options {dict(options)}: {error}"
            ) from error


def _imported(module: str) -> object:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a module may raise anything
        raise PluginError(f"plugin module {module!r} cannot be imported: {error}") from error


def _modules_asked_for() -> list[str]:
    names = os.environ.get(PLUGINS_VARIABLE, "").split(",")
    return [name.strip() for name in names if name.strip()]


@functools.cache
def plugin_host() -> PluginHost:
    """The process's plugin host: built-ins and installed plugins."""
    return PluginHost()
