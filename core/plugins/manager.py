"""The plugin host: who offers which backend, strategy, launcher and so on, under which name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pluggy

from isotrain.core.contracts.adapter import Adapter
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
    EnvironmentRegistry,
    LauncherRegistry,
    LoggerRegistry,
    ModelRegistry,
    Registry,
    StrategyRegistry,
)
from isotrain.core.system.version import VERSION

T = TypeVar("T")
BUILTINS = (
    "isotrain.core.plugins.builtin",
    "isotrain.adapters.builtin",
    "isotrain.strategies.builtin",
    "isotrain.environments.builtin",
    "isotrain.launchers.builtin",
)
"""The modules of this package that implement the registration hooks."""
PLUGINS_VARIABLE = "ISOTRAIN_PLUGINS"
"""Further plugin modules, separated by commas; the processes of a run inherit it."""
BLOCKED_VARIABLE = "ISOTRAIN_BLOCKED_PLUGINS"
"""Names of plugins to leave out, separated by commas; the processes of a run inherit it."""


class PluginManager:
    """Loads plugins and holds what they registered.

    Attributes:
        loaded: What became of every plugin, in the order in which they were found.
        backends, strategies, launchers, environments, models, loggers: What they registered.
    """

    def __init__(
        self,
        choice: PluginChoice | None = None,
        of_spec: Sequence[str] = (),
        *,
        entry_points: bool = True,
        strict: bool = True,
    ) -> None:
        """Loads all plugins.

        Args:
            choice: What was asked for in this process.
            of_spec: The modules and files that a spec names as plugins.
            entry_points: Whether to load the installed ones.
            strict: Whether a broken plugin is an error when it was asked for; otherwise it is left out,
                as a broken installed one always is.

        Raises:
            PluginError: A plugin that was asked for is broken, or one to be blocked is not there.
        """
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.backends = BackendRegistry()
        self.strategies = StrategyRegistry()
        self.launchers = LauncherRegistry()
        self.environments = EnvironmentRegistry()
        self.models = ModelRegistry()
        self.loggers = LoggerRegistry()
        self.loaded: list[PluginStatus] = []
        for module in BUILTINS:
            load = functools.partial(importlib.import_module, module)
            self._load(Candidate(module, "built in", module, load, PROJECT, VERSION))
        choice = choice or PluginChoice()
        wanted = list(_candidates(choice, of_spec, entry_points))
        _require_known(choice.blocked, wanted)
        blocked = {*choice.blocked, *_listed(BLOCKED_VARIABLE)}
        for candidate in wanted:
            if candidate.name in blocked:
                self.loaded.append(PluginStatus(candidate, "blocked"))
                continue
            try:
                self._load(candidate)
            except PluginError as error:
                if strict and candidate.source != "entry point":
                    raise PluginError(_named(candidate, error)) from error
                self.loaded.append(PluginStatus(candidate, "broken", fault=str(error)))

    @property
    def installed(self) -> list[Candidate]:
        """What installed packages offer, whatever became of it."""
        return [each.candidate for each in self.loaded if each.candidate.source == "entry point"]

    @property
    def faults(self) -> dict[str, str]:
        """Plugin name to what is wrong with it; such plugins are left out."""
        return {each.candidate.name: each.fault for each in self.loaded if each.fault is not None}

    @property
    def notes(self) -> dict[str, str]:
        """Plugin name to what is worth knowing about it."""
        found = {each.candidate.name: "; ".join(each.notes) for each in self.loaded}
        return {name: text for name, text in found.items() if text}

    def call_hook(self, hook: str, **facts: Any) -> None:
        """Calls an event hook on every plugin; one that raises is warned about and passed over.

        The order is pluggy's: the plugin that was registered last comes first, but for those that ask
        for another place.
        """
        # Not by pluggy's own call, which ends with the first that raises; wrappers, which only that would
        # honour, are refused when a plugin is loaded.
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
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
        label = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        candidate = Candidate(label, "in process", label, lambda: plugin)
        try:
            self._load(candidate)
        except PluginError as error:
            raise PluginError(_named(candidate, error)) from error

    def _load(self, candidate: Candidate) -> None:
        """Imports a plugin, checks it and lets it register; one that is there already is left alone."""
        found, seconds = candidates.timed(candidate.load)
        if self._manager.is_registered(found):
            return
        self._require_free_name(candidate)
        with candidates.guarded():
            api = candidates.checked_api(found)
            plugin = candidates.as_plugin(found)
            hooks = candidates.checked_hooks(plugin)
        registered = self._registered_by(plugin, candidate.name, hooks)
        notes = tuple(candidates.notes(seconds))
        self.loaded.append(
            PluginStatus(candidate, "loaded", api, hooks, registered, seconds, notes=notes)
        )

    def _require_free_name(self, candidate: Candidate) -> None:
        for other in self.loaded:
            if other.candidate.name == candidate.name and other.status == "loaded":
                taken = other.candidate
                raise PluginError(
                    f"another plugin has that name: {taken.distribution or taken.origin}"
                    f" ({taken.source}), so {candidate.distribution or candidate.origin} was left out."
                    " Uninstall one of them, or rename its entry point or file"
                )

    def _registered_by(
        self, plugin: object, name: str, hooks: Sequence[str]
    ) -> dict[str, tuple[str, ...]]:
        """Lets a plugin register; where it fails, nothing of it stays."""
        before = {kind: register.entries() for kind, register in self._registers.items()}
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
            for kind, register in self._registers.items():
                hook = candidates.registration_hook(kind)
                if hook in hooks:
                    _call(hook, getattr(plugin, hook), register)
        except Exception as error:  # a plugin may raise anything
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            for kind, register in self._registers.items():
                register.restore(before[kind])
            raise PluginError(str(error)) from error
        return {
            kind: new
            for kind, register in self._registers.items()
            if (new := _new(before[kind], register.entries()))
        }

    @property
    def _registers(self) -> Mapping[str, Registry[Any]]:
        return {
            "backends": self.backends,
            "strategies": self.strategies,
            "launchers": self.launchers,
            "environments": self.environments,
            "models": self.models,
            "loggers": self.loggers,
        }

    def backend(self, name: str) -> Adapter:
        """Makes the adapter of that name.

        Raises:
            IsotrainError: There is no such backend.
        """
        with self._naming_faults():
            return self.backends.get(name)()

    def launcher(self, name: str, options: Mapping[str, Any] | None = None) -> Launcher:
        """Makes the launcher of that name.

        Raises:
            IsotrainError: There is no such launcher, or it refuses the options.
        """
        with self._naming_faults():
            factory: Callable[..., Launcher] = self.launchers.get(name)
        return _made("launcher", name, factory, options or {})

    def environment(self, name: str) -> ClusterEnvironment:
        """Makes the environment of that name.

        Raises:
            IsotrainError: There is no such environment.
        """
        with self._naming_faults():
            return self.environments.get(name)()

    def strategy(self, name: str, options: Mapping[str, Any]) -> Strategy:
        """Makes the strategy of that name.

        Raises:
            IsotrainError: There is no such strategy, or it refuses the options.
        """
        with self._naming_faults():
            factory: Callable[..., Strategy] = self.strategies.get(name)
        return _made("strategy", name, factory, options)

    def logger(self, name: str, options: Mapping[str, Any]) -> Logger:
        """Makes the logger of that name.

        Raises:
            IsotrainError: There is no such logger, or it refuses the options.
        """
        with self._naming_faults():
            factory: Callable[..., Logger] = self.loggers.get(name)
        return _made("logger", name, factory, options)

    def model(self, name: str) -> Any:
        """What is registered as the model of that name: see `ModelRegistry`.

        Raises:
            IsotrainError: There is no such model.
        """
        with self._naming_faults():
            return self.models.get(name)

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


def _candidates(
    choice: PluginChoice, of_spec: Sequence[str], entry_points: bool
) -> Iterator[Candidate]:
    """All third-party plugins, each place where it is asked for once."""
    for where in _listed(PLUGINS_VARIABLE):
        yield candidates.of_module(where, PLUGINS_VARIABLE)
    yield from selection.candidates_of(choice)
    for where in of_spec:
        yield candidates.of_module(where, "spec")
    if entry_points:
        known = choice.installed
        yield from candidates.installed() if known is None else known


def _require_known(blocked: Sequence[str], wanted: Sequence[Candidate]) -> None:
    known = [candidate.name for candidate in wanted]
    for name in blocked:
        if name not in known:
            raise PluginError(f"to be blocked: {unknown_name('plugin', name, known)}")


def _named(candidate: Candidate, error: PluginError) -> str:
    return f"plugin {candidate.name!r} ({candidate.source}): {error}"


def _call(hook: str, implementation: Callable[..., None], register: Registry[Any]) -> None:
    try:
        implementation(register=register)
    except PluginError as error:
        raise PluginError(f"{hook}: {error}") from error
    except Exception as error:  # a plugin may raise anything
        raise PluginError(f"{hook}: {type(error).__name__}: {error}") from error


def _new(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in after if before.get(name) is not after[name])


def _made(kind: str, name: str, factory: Callable[..., T], options: Mapping[str, Any]) -> T:
    known = inspect.signature(factory).parameters if options else {}  # which takes milliseconds
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option not in known and not is_open:
            raise IsotrainError(unknown_name(f"option of the {kind} {name!r}:", option, known))
    try:
        return factory(**options)
    except TypeError as error:
        raise IsotrainError(
            f"{kind} {name!r} does not take the options {dict(options)}: {error}"
        ) from error


def _listed(variable: str) -> list[str]:
    names = os.environ.get(variable, "").split(",")
    return [name.strip() for name in names if name.strip()]


def plugin_manager(of_spec: Sequence[str] = ()) -> PluginManager:
    """The process's plugin host: built-ins, what was asked for here, and installed plugins.

    Args:
        of_spec: The modules and files that the spec at hand names as plugins.

    Raises:
        PluginError: A plugin that was asked for is broken.
    """
    return _host(selection.current(), tuple(of_spec))


@functools.lru_cache(maxsize=8)
def _host(choice: PluginChoice, of_spec: tuple[str, ...]) -> PluginManager:
    return PluginManager(choice, of_spec)


def register(plugin: Any, *, name: str | None = None) -> Any:
    """Registers a plugin in this process, as in a notebook: its runs have it from now on.

    What is registered under the same name again takes the place of what was: a cell may be run twice.
    A strategy or backend (or a plugin that registers one) travels to the processes of each run with the
    job, also when it is defined in this script or notebook. Can be used as a decorator.

    Args:
        plugin: A subclass of `Strategy`, `Adapter`, `Launcher`, `ClusterEnvironment` or `Logger`; or an
            object or module that implements hooks.
        name: Of the plugin, in `isotrain plugins` and messages; left out: the class's or module's own.

    Returns:
        `plugin`, unchanged.

    Raises:
        PluginError: It is broken; it is not registered then.
    """
    label = name or getattr(plugin, "name", None) or getattr(plugin, "__name__", None)
    label = label if isinstance(label, str) else type(plugin).__name__
    choice = selection.with_registered(selection.current(), label, plugin)
    _host(choice, ())
    selection.set_current(choice)
    return plugin
