"""Which plugins this process was asked to have beside the installed ones, and which to leave out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from isotrain.core.contracts.job import PluginChoice
from isotrain.core.plugins import plugin
from isotrain.core.plugins.plugin import Candidate, as_plugin, registration_hook

_IN_WORKERS = ("backends", "strategies", "models")
"""What the processes of a run need; the rest is used by the process that launches them."""


class _Process:
    """This process's choice."""

    choice = PluginChoice()


def current() -> PluginChoice:
    """What was asked for in this process so far."""
    return _Process.choice


def set_current(choice: PluginChoice) -> None:
    """Makes this process's choice that of the process which started it."""
    _Process.choice = choice


@contextlib.contextmanager
def chosen(requested: Sequence[str], blocked: Sequence[str]) -> Iterator[None]:
    """Has these plugins for a while, beside what was asked for before."""
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
    """All plugins that were asked for."""
    for where in choice.requested:
        yield plugin.of_module(where, "--plugin")
    for name, thing in choice.registered:
        origin = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
        load = functools.partial(_itself, thing)
        yield Candidate(name, "in process", origin or type(thing).__qualname__, load)


def for_workers(choice: PluginChoice, installed: Sequence[Candidate] | None = None) -> PluginChoice:
    """As much of a choice as the processes of a run need, which is what travels to them.

    Args:
        choice: What was asked for.
        installed: What installed packages offer; processes that are given it need not look in all of them.
    """
    hooks = [registration_hook(kind) for kind in _IN_WORKERS]
    needed = [
        (name, thing)
        for name, thing in choice.registered
        if name not in choice.blocked and any(hasattr(as_plugin(thing), hook) for hook in hooks)
    ]
    here = [name for name, _ in choice.registered]
    blocked = [name for name in choice.blocked if name not in here]
    found = None if installed is None else tuple(installed)
    return replace(choice, registered=tuple(needed), blocked=tuple(blocked), installed=found)


def with_registered(choice: PluginChoice, name: str, thing: object) -> PluginChoice:
    """A choice that also has `thing`, in the place of what was registered by that name before."""
    others = [(n, t) for n, t in choice.registered if n != name]
    return replace(choice, registered=(*others, (name, thing)))


def _itself(thing: object) -> object:
    return thing
