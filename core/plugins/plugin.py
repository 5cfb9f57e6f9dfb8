"""One plugin: where it comes from, whether it is sound, and what became of it."""

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
"""What a plugin states the version of the interface in that it was written for."""
SLOW_SECONDS = 1.0
"""An import that takes longer is remarked upon."""
HOOKS = tuple(name for name in vars(hookspecs) if name.startswith(f"{hookspecs.PROJECT}_"))
_MARK = f"{hookspecs.PROJECT}_impl"


@dataclass(frozen=True)
class Candidate:
    """A plugin that may be loaded.

    Attributes:
        name: Under which it is listed and can be blocked.
        source: How it was found: `built in`, `ISOTRAIN_PLUGINS`, `--plugin`, `spec`, `entry point`
            or `in process`.
        origin: Module, file or object that it is.
        load: Imports it.
        distribution: The installed package that it belongs to.
        version: Of that package.
    """

    name: str
    source: str
    origin: str
    load: Callable[[], object]
    distribution: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class PluginStatus:
    """What became of a candidate.

    Attributes:
        candidate: Where it came from.
        status: `loaded`, `blocked` or `broken`.
        api: The version of the interface that it says it was written for.
        hooks: Those it implements.
        registered: Kind to the names that it registered.
        seconds: That its import took.
        fault: Why it was left out, when broken.
        notes: What is not wrong, but worth knowing.
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
        """All of it as plain JSON values."""
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


def of_module(where: str, source: str) -> Candidate:
    """A plugin that was named as a module, or as a file that ends in `.py`."""
    name = Path(where).name if where.endswith(".py") else where

    def load() -> object:
        try:
            return import_strings.load_module(where)
        except SpecError as error:
            raise PluginError(str(error)) from error

    return Candidate(name, source, where, load)


def installed() -> Iterator[Candidate]:
    """Every plugin that an installed package offers as an entry point, by package and name."""
    found = [(getattr(e, "dist", None), e) for e in metadata.entry_points(group=hookspecs.PROJECT)]
    found.sort(key=lambda each: (each[0].name if each[0] else "", each[1].name))
    for package, entry in found:
        yield Candidate(
            entry.name,
            "entry point",
            getattr(entry, "value", entry.name),
            entry.load,
            package.name if package else None,
            package.version if package else None,
        )


def registration_hook(kind: str) -> str:
    """The hook that registers things of a kind, such as `strategies`."""
    return f"{hookspecs.PROJECT}_register_{kind}"


def as_plugin(thing: object) -> object:
    """Makes a plugin of a class that fulfils a contract; anything else is one already."""
    for kind, make_register in REGISTRIES.items():
        contract = make_register().contract
        if contract is not object and isinstance(thing, type) and issubclass(thing, contract):
            plugin = types.SimpleNamespace()
            setattr(plugin, API_ATTRIBUTE, getattr(thing, API_ATTRIBUTE, None))
            implementation = hookspecs.hookimpl(lambda register: register.add(thing))
            setattr(plugin, registration_hook(kind), implementation)
            return plugin
    return thing


def timed(load: Callable[[], object]) -> tuple[object, float]:
    """Imports a plugin; returns it and the seconds that took.

    Raises:
        PluginError: It raised, or tried to end the program.
    """
    began = time.perf_counter()
    with guarded():
        found = load()
    return found, time.perf_counter() - began


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Around what runs code of a plugin, which may raise anything.

    Raises:
        PluginError: It raised, or tried to end the program.
    """
    try:
        yield
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{type(error).__name__}: {error}") from error


def notes(seconds: float) -> Iterator[str]:
    """What is worth knowing about a sound plugin whose import took so long."""
    if seconds > SLOW_SECONDS:
        yield (
            f"importing it took {seconds:.1f} s, which every command waits for: import what is"
            " heavy where it is used, and register by reference ('package.module:Class')"
        )


def checked_hooks(plugin: object) -> tuple[str, ...]:
    """The hooks that a plugin implements.

    Raises:
        PluginError: One is misspelled or not marked, or asks for what hooks are not given here, or there
            is none.
    """
    routines = {name: getattr(plugin, name, None) for name in dir(plugin)}
    marked = {n for n, r in routines.items() if inspect.isroutine(r) and hasattr(r, _MARK)}
    for name in marked - set(HOOKS):
        raise PluginError(unknown_name("hook", name, HOOKS))
    for name in sorted(set(HOOKS) & set(routines) - marked):
        raise PluginError(f"{name} is not marked with @isotrain.hookimpl, so it is never called")
    if not marked:
        raise PluginError("it implements none of the hooks, whose names begin with isotrain_")
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
    """Refuses what pluggy offers and isotrain does not honour."""
    if options["wrapper"] or options["hookwrapper"]:
        raise PluginError(
            f"{hook} cannot be a wrapper: plugins are called one at a time, so that one that raises"
            " harms no other. Leave out wrapper=True; tryfirst and trylast put an event hook before or"
            " after those of other plugins"
        )
    if (options["tryfirst"] or options["trylast"]) and hook in map(registration_hook, REGISTRIES):
        raise PluginError(
            f"{hook} cannot be tryfirst or trylast: plugins register in the order in which they are"
            " found. register.add(..., replace=True) takes the place of what is there"
        )


def checked_api(plugin: object) -> str | None:
    """The version of the interface that a plugin says it needs; None when it says nothing.

    Raises:
        PluginError: This isotrain does not have that version.
    """
    stated = getattr(plugin, API_ATTRIBUTE, None)
    if stated is None:
        return None
    if not (isinstance(stated, str) and re.fullmatch(r"\d+(\.\d+)?", stated)):
        raise PluginError(f"{API_ATTRIBUTE}: expected text such as '1' or '1.0', got {stated!r}")
    major, minor = _numbers(stated)
    own_major, own_minor = _numbers(hookspecs.API_VERSION)
    if major != own_major or minor > own_minor:
        raise PluginError(
            f"{API_ATTRIBUTE}: it needs version {stated} of the plugin interface, and this isotrain has"
            f" {hookspecs.API_VERSION}. Install a version of isotrain, or of the plugin, that fits the"
            " other"
        )
    return stated


def _numbers(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)
