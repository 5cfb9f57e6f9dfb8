"""The plugin manager: loads plugins and looks up backends, strategies, launchers and others by name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pluggy

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.cluster_environment import ClusterEnvironment
from isotrain.core.contracts.job import PluginChoice
from isotrain.core.contracts.launcher import Launcher
from isotrain.core.contracts.logger import Logger
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import IsotrainError, PluginError, unknown_name
from isotrain.core.plugins import hookspecs, selection
from isotrain.core.plugins import plugin as candidates
from isotrain.core.plugins.hookspecs import PROJECT
from isotrain.core.plugins.plugin import Candidate, PluginStatus
from isotrain.core.plugins.registries import (
    BackendRegistry,
    CallbackRegistry,
    EnvironmentRegistry,
    LauncherRegistry,
    LoggerRegistry,
    ModelRegistry,
    Registry,
    StrategyRegistry,
)
from isotrain.core.system.version import VERSION

T = TypeVar("T")
_LOG = logging.getLogger("isotrain.plugins")
BUILTINS = (
    "isotrain.core.plugins.builtin",
    "isotrain.adapters.builtin",
    "isotrain.strategies.builtin",
    "isotrain.environments.builtin",
    "isotrain.launchers.builtin",
    "isotrain.testing.builtin",
)
"""Modules of isotrain that implement the registration hooks."""
PLUGINS_VARIABLE = "ISOTRAIN_PLUGINS"
"""Environment variable with further plugin modules, comma-separated; inherited by the processes of a run."""
BLOCKED_VARIABLE = "ISOTRAIN_BLOCKED_PLUGINS"
"""Environment variable with names of plugins not to load, comma-separated; inherited likewise."""


class PluginManager:
    """Plugin manager over pluggy: built-in plugins, requested ones and those of installed packages.

    Attributes:
        loaded: Status of every plugin, in the order in which they were found.
        backends, strategies, launchers, environments, models, loggers, callbacks: Registries by kind.
    """

    def __init__(
        self,
        choice: PluginChoice | None = None,
        spec_plugins: Sequence[str] = (),
        *,
        entry_points: bool = True,
        strict: bool = True,
    ) -> None:
        """Loads all plugins.

        Args:
            choice: Plugins that this process requests and blocks.
            spec_plugins: Modules and files in the spec's field `plugins`.
            entry_points: Whether to load plugins of installed packages.
            strict: Whether a broken requested plugin is an error; otherwise it is skipped, as broken plugins
                of installed packages always are.

        Raises:
            PluginError: A requested plugin is broken, or a blocked one does not exist.
        """
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.backends = BackendRegistry()
        self.strategies = StrategyRegistry()
        self.launchers = LauncherRegistry()
        self.environments = EnvironmentRegistry()
        self.models = ModelRegistry()
        self.loggers = LoggerRegistry()
        self.callbacks = CallbackRegistry()
        self.loaded: list[PluginStatus] = []
        for module in BUILTINS:
            load = functools.partial(importlib.import_module, module)
            self._load(Candidate(module, "built in", module, load, PROJECT, VERSION))
        choice = choice or PluginChoice()
        third_party = list(_third_party_candidates(choice, spec_plugins, entry_points))
        _require_known(choice.blocked, third_party)
        blocked = {*choice.blocked, *_names_in_variable(BLOCKED_VARIABLE)}
        for candidate in third_party:
            if candidate.name in blocked:
                self.loaded.append(PluginStatus(candidate, "blocked"))
                continue
            try:
                self._load(candidate)
            except PluginError as error:
                if strict and candidate.source != "entry point":
                    raise PluginError(_fault_text(candidate, error)) from error
                self.loaded.append(PluginStatus(candidate, "broken", fault=str(error)))

    @property
    def installed(self) -> list[Candidate]:
        """Plugins of installed packages, loaded or not."""
        return [each.candidate for each in self.loaded if each.candidate.source == "entry point"]

    @property
    def faults(self) -> dict[str, str]:
        """Name of each broken plugin to its fault."""
        return {each.candidate.name: each.fault for each in self.loaded if each.fault is not None}

    @property
    def notes(self) -> dict[str, str]:
        """Plugin name to its notes; plugins without notes are absent."""
        notes = {each.candidate.name: "; ".join(each.notes) for each in self.loaded}
        return {name: text for name, text in notes.items() if text}

    def call_hook(self, hook: str, **values: Any) -> None:
        """Calls an event hook on every plugin; warns about exceptions and continues.

        The order is pluggy's: last registered, first called, except for `tryfirst` and `trylast`.

        Args:
            hook: Name of the hook.
            values: Arguments of the hook by name; plugins receive those that they declare.
        """
        # Not by pluggy's own call, which ends with the first that raises; wrappers, which only that would
        # call, are refused when a plugin is loaded.
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            arguments = {name: values[name] for name in implementation.argnames}
            try:
                implementation.function(**arguments)
            except Exception as error:  # a plugin may raise anything
                warnings.warn(
                    f"plugin {implementation.plugin_name!r}, {hook}: {type(error).__name__}: {error}",
                    stacklevel=2,
                )

    def add(self, plugin: object, *, name: str | None = None) -> None:
        """Loads a plugin object.

        Args:
            plugin: Module or object that implements hooks, or a subclass of a contract.
            name: Name of the plugin; None: the class's or module's.

        Raises:
            PluginError: It is broken: a misspelled hook, a name that is taken, an exception.
        """
        label = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        candidate = Candidate(label, "in process", label, lambda: plugin)
        try:
            self._load(candidate)
        except PluginError as error:
            raise PluginError(_fault_text(candidate, error)) from error

    def _load(self, candidate: Candidate) -> None:
        """Imports, checks and registers a plugin, unless it is registered already."""
        imported, seconds = candidates.timed_load(candidate.load)
        if self._manager.is_registered(imported):
            return
        self._require_free_name(candidate)
        with candidates.guarded():
            api = candidates.check_api(imported)
            plugin = candidates.as_plugin(imported)
            hooks = candidates.check_hooks(plugin)
        registered = self._register(plugin, candidate.name, hooks)
        _LOG.debug("plugin %r from %s, in %.3f s", candidate.name, candidate.source, seconds)
        notes = tuple(candidates.notes(seconds))
        self.loaded.append(
            PluginStatus(candidate, "loaded", api, hooks, registered, seconds, notes=notes)
        )

    def _require_free_name(self, candidate: Candidate) -> None:
        for other in self.loaded:
            if other.candidate.name == candidate.name and other.status == "loaded":
                loaded = other.candidate
                raise PluginError(
                    f"another plugin has that name: {loaded.distribution or loaded.origin}"
                    f" ({loaded.source}), so {candidate.distribution or candidate.origin} was left out."
                    " Uninstall one of them, or rename its entry point or file"
                )

    def _register(
        self, plugin: object, name: str, hooks: Sequence[str]
    ) -> dict[str, tuple[str, ...]]:
        """Calls a plugin's registration hooks, and undoes them all if one fails.

        Returns:
            Kind to the names that the plugin registered.
        """
        before = {kind: registry.entries() for kind, registry in self._registries.items()}
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
            for kind, registry in self._registries.items():
                hook = candidates.registration_hook(kind)
                if hook in hooks:
                    _call_registration(hook, getattr(plugin, hook), registry)
        except Exception as error:  # a plugin may raise anything
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            for kind, registry in self._registries.items():
                registry.restore(before[kind])
            raise PluginError(str(error)) from error
        return {
            kind: names
            for kind, registry in self._registries.items()
            if (names := _changed_names(before[kind], registry.entries()))
        }

    @property
    def _registries(self) -> Mapping[str, Registry[Any]]:
        return {
            "backends": self.backends,
            "strategies": self.strategies,
            "launchers": self.launchers,
            "environments": self.environments,
            "models": self.models,
            "loggers": self.loggers,
            "callbacks": self.callbacks,
        }

    def backend(self, name: str) -> Adapter:
        """New adapter of a registered backend.

        Raises:
            IsotrainError: The name is not registered.
        """
        with self._listing_faults():
            try:
                return self.backends.get(name)()
            except PluginError as error:
                owners = (p for p in self.loaded if name in p.registered.get("backends", ()))
                names = "".join(f"plugin {p.candidate.name!r}: " for p in owners)
                error.args = (names + str(error),)
                raise

    def launcher(self, name: str, options: Mapping[str, Any] | None = None) -> Launcher:
        """New instance of a registered launcher.

        Raises:
            IsotrainError: The name is not registered, or the launcher refuses the options.
        """
        with self._listing_faults():
            factory: Callable[..., Launcher] = self.launchers.get(name)
        return _create("launcher", name, factory, options or {})

    def environment(self, name: str) -> ClusterEnvironment:
        """New instance of a registered cluster environment.

        Raises:
            IsotrainError: The name is not registered.
        """
        with self._listing_faults():
            return self.environments.get(name)()

    def strategy(self, name: str, options: Mapping[str, Any]) -> Strategy:
        """New instance of a registered strategy.

        Raises:
            IsotrainError: The name is not registered, or the strategy refuses the options.
        """
        with self._listing_faults():
            factory: Callable[..., Strategy] = self.strategies.get(name)
        return _create("strategy", name, factory, options)

    def logger(self, name: str, options: Mapping[str, Any]) -> Logger:
        """New instance of a registered logger.

        Raises:
            IsotrainError: The name is not registered, or the logger refuses the options.
        """
        with self._listing_faults():
            factory: Callable[..., Logger] = self.loggers.get(name)
        return _create("logger", name, factory, options)

    def model(self, name: str) -> Any:
        """Registered model builder; see `ModelRegistry.get`.

        Raises:
            IsotrainError: The name is not registered.
        """
        with self._listing_faults():
            return self.models.get(name)

    def callback(self, name: str) -> Any:
        """Registered callback; see `CallbackRegistry.get`.

        Raises:
            IsotrainError: The name is not registered.
        """
        with self._listing_faults():
            return self.callbacks.get(name)

    @contextlib.contextmanager
    def _listing_faults(self) -> Iterator[None]:
        """Context that adds the broken plugins to an error: the missing name may be one of theirs."""
        try:
            yield
        except IsotrainError as error:
            if self.faults:
                left_out = "; ".join(f"{name} ({fault})" for name, fault in self.faults.items())
                error.args = (f"{error} Plugins that were left out: {left_out}.",)
            raise


def _third_party_candidates(
    choice: PluginChoice, spec_plugins: Sequence[str], entry_points: bool
) -> Iterator[Candidate]:
    """Candidates of all plugins but the built-in ones, in the order of loading."""
    for module in _names_in_variable(PLUGINS_VARIABLE):
        yield candidates.module_candidate(module, PLUGINS_VARIABLE)
    yield from selection.candidates_of(choice)
    for module in spec_plugins:
        yield candidates.module_candidate(module, "spec")
    if entry_points:
        installed = choice.installed
        yield from candidates.installed_candidates() if installed is None else installed


def _require_known(blocked: Sequence[str], third_party: Sequence[Candidate]) -> None:
    names = [candidate.name for candidate in third_party]
    for name in blocked:
        if name not in names:
            raise PluginError(f"to be blocked: {unknown_name('plugin', name, names)}")


def _fault_text(candidate: Candidate, error: PluginError) -> str:
    return f"plugin {candidate.name!r} ({candidate.source}): {error}"


def _call_registration(
    hook: str, implementation: Callable[..., None], registry: Registry[Any]
) -> None:
    try:
        implementation(register=registry)
    except PluginError as error:
        raise PluginError(f"{hook}: {error}") from error
    except Exception as error:  # a plugin may raise anything
        raise PluginError(f"{hook}: {type(error).__name__}: {error}") from error


def _changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in after if before.get(name) is not after[name])


def _create(kind: str, name: str, factory: Callable[..., T], options: Mapping[str, Any]) -> T:
    parameters = (
        inspect.signature(factory).parameters if options else {}
    )  # which takes milliseconds
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in parameters and not is_open:
            raise IsotrainError(unknown_name(f"option of the {kind} {name!r}:", option, parameters))
    try:
        return factory(**options)
    except TypeError as error:
        raise IsotrainError(
            f"{kind} {name!r} does not take the options {dict(options)}: {error}"
        ) from error


def _names_in_variable(variable: str) -> list[str]:
    names = os.environ.get(variable, "").split(",")
    return [name.strip() for name in names if name.strip()]


def plugin_manager(spec_plugins: Sequence[str] = ()) -> PluginManager:
    """This process's plugin manager, cached: built-in, requested and installed plugins.

    Args:
        spec_plugins: Modules and files in the spec's field `plugins`.

    Raises:
        PluginError: A requested plugin is broken.
    """
    return _cached_manager(selection.current(), tuple(spec_plugins))


@functools.lru_cache(maxsize=8)
def _cached_manager(choice: PluginChoice, spec_plugins: tuple[str, ...]) -> PluginManager:
    return PluginManager(choice, spec_plugins)


def register(plugin: Any, *, name: str | None = None) -> Any:
    """Registers a plugin in this process, such as a notebook, for all its later runs. Usable as a decorator.

    Registering under the same name again replaces the plugin, so that a notebook cell can run twice.
    Strategies and backends are sent to the processes of each run, even if they are defined in this script or
    notebook.

    Args:
        plugin: Subclass of `Strategy`, `Adapter`, `Launcher`, `ClusterEnvironment` or `Logger`; or an
            object or module that implements hooks.
        name: Name of the plugin in `isotrain plugins` and messages; None: the class's or module's.

    Returns:
        `plugin`, unchanged.

    Raises:
        PluginError: The plugin is broken; it is not registered.
    """
    label = name or getattr(plugin, "name", None) or getattr(plugin, "__name__", None)
    label = label if isinstance(label, str) else type(plugin).__name__
    choice = selection.with_registered(selection.current(), label, plugin)
    _cached_manager(choice, ())
    selection.set_current(choice)
    return plugin
