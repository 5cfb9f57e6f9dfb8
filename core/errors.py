"""The errors that a person using isotrain can meet."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class IsotrainError(Exception):
    """Base of every error that isotrain raises on purpose; its text says what to do."""


class SpecError(IsotrainError):
    """The training spec is wrong: lists every problem with its field path."""


class PlanError(IsotrainError):
    """The spec is sound but cannot run like this: the backend, strategy and replicas do not fit."""


class UnsupportedError(PlanError):
    """A backend was asked for something it declares it cannot do."""


class BackendUnavailableError(PlanError):
    """The requested backend cannot run in this environment; carries the install hint."""


class DataError(IsotrainError):
    """A data source does not give what the run needs."""


class PluginError(IsotrainError):
    """A plugin is broken, or two plugins register the same name."""


class RunFailedError(IsotrainError):
    """A run ended early: which rank, at which step, in which call, and its traceback."""


def unknown_name(kind: str, name: str, available: Iterable[str]) -> str:
    """Says that `name` is no known `kind`, what is, and which one was probably meant."""
    known = sorted(available)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Available: {', '.join(known) or 'none'}."
