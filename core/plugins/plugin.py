"""One plugin: where it comes from, whether it is valid, and whether it was loaded."""

from __future__ import annotations

import contextlib
import inspect
import re
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from isotrain.core.errors import PluginError, SpecError, unknown_name
from isotrain.core.plugins import hookspecs
from isotrain.core.plugins.registries import REGISTRIES
from isotrain.core.spec import import_strings

API_ATTRIBUTE = "isotrain_api"
"""Attribute of a plugin with the version of the plugin API that it was written for."""
SLOW_SECONDS = 1.0
"""Import time above which a plugin gets a note."""
HOOKS = tuple(name for name in vars(hookspecs) if name.startswith(f"{hookspecs.PROJECT}_"))
_MARK = f"{hookspecs.PROJECT}_impl"


@dataclass(frozen=True)
class Candidate:
    """A plugin that may be loaded.

    Attributes:
        name: Name under which it is listed and can be blocked.
        source: Source of the plugin: `built in`, `ISOTRAIN_PLUGINS`, `--plugin`, `spec`, `entry point`
            or `in process`.
        origin: Module, file or name of the object.
        load: Function that imports and returns it.
        distribution: Installed package that it belongs to.
        version: Version of that package.
    """

    name: str
    source: str
    origin: str
    load: Callable[[], object]
    distribution: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class PluginStatus:
    """Outcome of loading a candidate.

    Attributes:
        candidate: The candidate.
        status: `loaded`, `blocked` or `broken`.
        api: Version of the plugin API that it declares; None for none.
        hooks: Names of the hooks that it implements.
        registered: Kind, such as `strategies`, to the names that it registered.
        seconds: Import time in seconds.
        fault: Reason why it is broken; None for others.
        notes: Notes on the plugin that are no errors.
    """

    candidate: Candidate
    status: str
    api: str | None = None
    hooks: Sequence[str] = ()
    registered: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seconds: float = 0.0
    fault: str | None = None
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """The status as JSON values."""
        candidate = self.candidate
        return {
            "name": candidate.name,
            "status": self.status,
            "source": candidate.source,
            "origin": candidate.origin,
            "distribution": candidate.distribution,
            "version": candidate.version,
            "api": self.api,
            "hooks": list(self.hooks),
            "registered": {kind: list(names) for kind, names in self.registered.items()},
            "import_s": self.seconds,
            "fault": self.fault,
            "notes": list(self.notes),
        }


def module_candidate(module: str, source: str) -> Candidate:
    """Candidate of a dotted module name or the path of a `.py` file."""
    name = Path(module).name if module.endswith(".py") else module

    def load() -> object:
        try:
            return import_strings.load_module(module)
        except SpecError as error:
            raise PluginError(str(error)) from error

    return Candidate(name, source, module, load)


def installed_candidates() -> Iterator[Candidate]:
    """Candidates of all entry points of installed packages, sorted by package and name."""
    entries = [
        (getattr(each, "dist", None), each)
        for each in metadata.entry_points(group=hookspecs.PROJECT)
    ]
    entries.sort(key=lambda each: (each[0].name if each[0] else "", each[1].name))
    for package, entry in entries:
        yield Candidate(
            entry.name,
            "entry point",
            getattr(entry, "value", entry.name),
            entry.load,
            package.name if package else None,
            package.version if package else None,
        )


def registration_hook(kind: str) -> str:
    """Name of the hook that registers plugins of a kind, such as `strategies`."""
    return f"{hookspecs.PROJECT}_register_{kind}"


def as_plugin(value: object) -> object:
    """Plugin that registers a class, if the argument is a subclass of a contract; otherwise the argument."""
    for kind, make_register in REGISTRIES.items():
        contract = make_register().contract
        if contract is not object and isinstance(value, type) and issubclass(value, contract):
            plugin = types.SimpleNamespace()
            setattr(plugin, API_ATTRIBUTE, getattr(value, API_ATTRIBUTE, None))
            implementation = hookspecs.hookimpl(lambda register: register.add(value))
            setattr(plugin, registration_hook(kind), implementation)
            return plugin
    return value


def timed_load(load: Callable[[], object]) -> tuple[object, float]:
    """Imports a plugin; returns it and the import time in seconds.

    Raises:
        PluginError: The import raised, or tried to exit.
    """
    start = time.perf_counter()
    with guarded():
        plugin = load()
    return plugin, time.perf_counter() - start


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Context for code of a plugin: any exception becomes a `PluginError`.

    Raises:
        PluginError: The code raised, or tried to exit.
    """
    try:
        yield
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{type(error).__name__}: {error}") from error


def notes(seconds: float) -> Iterator[str]:
    """Notes on a valid plugin with this import time."""
    if seconds > SLOW_SECONDS:
        yield (
            f"importing it took {seconds:.1f} s, which every command waits for: import heavy modules"
            " where they are used, and register by reference ('package.module:Class')"
        )


def check_hooks(plugin: object) -> tuple[str, ...]:
    """Names of the hooks that a plugin implements.

    Raises:
        PluginError: A hook is misspelled or not marked, has unknown parameters or unsupported options, or the
            plugin implements none.
    """
    routines = {name: getattr(plugin, name, None) for name in dir(plugin)}
    marked = {n for n, r in routines.items() if inspect.isroutine(r) and hasattr(r, _MARK)}
    for name in marked - set(HOOKS):
        raise PluginError(unknown_name("hook", name, HOOKS))
    for name in sorted(set(HOOKS) & set(routines) - marked):
        raise PluginError(f"{name} is not marked with @isotrain.hookimpl, so it is never called")
    if not marked:
        raise PluginError("it implements no hook; names of hooks begin with isotrain_")
    for name in sorted(marked):
        _check_parameters(name, routines[name])
        _check_options(name, getattr(routines[name], _MARK))
    return tuple(hook for hook in HOOKS if hook in marked)


def _check_parameters(hook: str, implementation: Any) -> None:
    known = inspect.signature(getattr(hookspecs, hook)).parameters
    unknown = [name for name in inspect.signature(implementation).parameters if name not in known]
    if unknown:
        raise PluginError(
            f"{hook} has no parameter {' or '.join(unknown)}; it has {', '.join(known)}"
        )


def _check_options(hook: str, options: Mapping[str, Any]) -> None:
    """Refuses options of pluggy's that isotrain does not support."""
    if options["wrapper"] or options["hookwrapper"]:
        raise PluginError(
            f"{hook} cannot be a wrapper: hooks are called one at a time, so that an exception in one"
            " plugin does not affect the others. Remove wrapper=True; tryfirst and trylast put an event"
            " hook before or after those of other plugins"
        )
    if (options["tryfirst"] or options["trylast"]) and hook in map(registration_hook, REGISTRIES):
        raise PluginError(
            f"{hook} cannot be tryfirst or trylast: plugins register in the order in which they are"
            " found. register.add(..., replace=True) replaces what is registered"
        )


def check_api(plugin: object) -> str | None:
    """Version of the plugin API that a plugin declares to need; None if it declares none.

    Raises:
        PluginError: This isotrain does not provide that version.
    """
    needed = getattr(plugin, API_ATTRIBUTE, None)
    if needed is None:
        return None
    if not (isinstance(needed, str) and re.fullmatch(r"\d+(\.\d+)?", needed)):
        raise PluginError(f"{API_ATTRIBUTE}: expected text such as '1' or '1.0', got {needed!r}")
    major, minor = _major_minor(needed)
    available_major, available_minor = _major_minor(hookspecs.API_VERSION)
    if major != available_major or minor > available_minor:
        raise PluginError(
            f"{API_ATTRIBUTE}: it needs version {needed} of the plugin interface, and this isotrain has"
            f" {hookspecs.API_VERSION}. Install a version of isotrain, or of the plugin, that fits the other"
        )
    return needed


def _major_minor(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)
