"""The plugin choice of this process: plugins requested besides the installed ones, and blocked ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from isotrain.core.contracts.job import PluginChoice
from isotrain.core.plugins import plugin
from isotrain.core.plugins.plugin import Candidate, as_plugin, registration_hook

_IN_WORKERS = ("backends", "strategies", "models", "callbacks")
"""Kinds of plugins that the processes of a run need; only the launching process uses the others."""


class _Process:
    """Holder of this process's choice."""

    choice = PluginChoice()


def current() -> PluginChoice:
    """This process's plugin choice."""
    return _Process.choice


def set_current(choice: PluginChoice) -> None:
    """Sets this process's plugin choice, such as to that of the launching process."""
    _Process.choice = choice


@contextlib.contextmanager
def using(requested: Sequence[str], blocked: Sequence[str]) -> Iterator[None]:
    """Context with additional requested and blocked plugins."""
    before = _Process.choice
    _Process.choice = replace(
        before,
        requested=(*before.requested, *requested),
        blocked=(*before.blocked, *blocked),
    )
    try:
        yield
    finally:
        _Process.choice = before


def candidates_of(choice: PluginChoice) -> Iterator[Candidate]:
    """Candidates of all requested and registered plugins of a choice."""
    for reference in choice.requested:
        yield plugin.module_candidate(reference, "--plugin")
    for name, registered in choice.registered:
        origin = getattr(registered, "__qualname__", None) or getattr(registered, "__name__", None)
        load = functools.partial(_identity, registered)
        yield Candidate(name, "in process", origin or type(registered).__qualname__, load)


def for_workers(choice: PluginChoice, installed: Sequence[Candidate] | None = None) -> PluginChoice:
    """The part of a choice that the processes of a run need, to send to them.

    Args:
        choice: Choice of the launching process.
        installed: Plugins of installed packages, so that the processes need not search them again.
    """
    hooks = [registration_hook(kind) for kind in _IN_WORKERS]
    needed = [
        (name, registered)
        for name, registered in choice.registered
        if name not in choice.blocked
        and any(hasattr(as_plugin(registered), hook) for hook in hooks)
    ]
    names = [name for name, _ in choice.registered]
    blocked = [name for name in choice.blocked if name not in names]
    candidates = None if installed is None else tuple(installed)
    return replace(choice, registered=tuple(needed), blocked=tuple(blocked), installed=candidates)


def with_registered(choice: PluginChoice, name: str, implementation: object) -> PluginChoice:
    """A choice with another registered plugin, which replaces one of the same name."""
    others = [(other, registered) for other, registered in choice.registered if other != name]
    return replace(choice, registered=(*others, (name, implementation)))


def _identity(value: object) -> object:
    return value
