"""The errors that a person using isotrain can meet."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

_WORD = re.compile(r"[^\W_]+")


class IsotrainError(Exception):
    """Base of every error that isotrain raises on purpose; its text says what to do."""


class SpecError(IsotrainError):
    """The training spec is wrong: lists every problem with its field path."""


class PlanError(IsotrainError):
    """The spec is sound but cannot run like this: the backend, strategy and replicas do not fit."""


class ClusterInfoError(IsotrainError):
    """Who this process is cannot be told: an engine's variables are half set, or two engines claim it."""


class UnsupportedError(PlanError):
    """A backend was asked for something it declares it cannot do."""


class BackendUnavailableError(PlanError):
    """The requested backend cannot run in this environment; carries the install hint."""


class DataError(IsotrainError):
    """A data source does not give what the run needs."""


class CheckpointError(IsotrainError):
    """A checkpoint cannot be written or read, or is not as it was written; names the file."""


class PluginError(IsotrainError):
    """A plugin is broken, or two plugins register the same name."""


class RunFailedError(IsotrainError):
    """A run ended early: which rank, at which step, in which call, and its traceback.

    Attributes:
        steps_done: By the process that came furthest; None where no process has told.
        was_asked: Whether it ended because somebody had asked for that.
        lost_host: The host that was lost with all its ranks, where others were not; None: none was.
        result: What `run` or `launch` would have returned, where only the run's files are to blame; None:
            there is no result.
    """

    steps_done: int | None = None
    was_asked = False
    lost_host: str | None = None
    result: Any = None


class NotANumberError(RunFailedError):
    """A loss was NaN: at which step, and what is to blame as far as can be seen."""


class EndedError(RunFailedError):
    """This process of a run was asked to end."""

    was_asked = True


class PeerLostError(RunFailedError):
    """Another process of the run is gone, has failed, or did not come: it is to blame, not this one."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The `known` name that `name` was probably meant to be, whatever its case; None: none is near.

    Where all words of `name` are in several (`mean` in `mean_squared_error`), it has too few to tell.
    """
    by_lower_case = {each.lower(): each for each in known}
    wanted = name.lower()
    near = _with_its_words(wanted, by_lower_case)
    if near is None:
        same_letters = (each for each in by_lower_case if sorted(each) == sorted(wanted))
        near = difflib.get_close_matches(wanted, by_lower_case, n=1) or [*same_letters]
    return by_lower_case[near[0]] if near else None


def _with_its_words(name: str, known: Iterable[str]) -> list[str] | None:
    """The one with all words of a name and the fewest others, none where several have; None: no such one."""
    words = set(_WORD.findall(name))
    if not words:
        return None
    parts = {each: set(_WORD.findall(each)) for each in known}
    joined = "".join(_WORD.findall(name))
    others = {n: len(p) - len(words) for n, p in parts.items() if words <= p or joined in p}
    if not others:
        return None
    fewest = [each for each, count in others.items() if count == min(others.values())]
    return fewest if len(fewest) == 1 else []


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest right name, with a space before it; or nothing."""
    return whether_meant(nearest(name, known))


def whether_meant(name: str | None, begins: str = " Did") -> str:
    """A question that names what was probably meant, or nothing; `begins` is its first word."""
    return f"{begins} you mean {name!r}?" if name else ""


def unknown_name(
    kind: str, name: str, available: Iterable[str], *, called_here: str | None = None
) -> str:
    """Says that `name` is no known `kind`, what is, and which one was probably meant.

    Args:
        kind: What it would be the name of.
        name: As it was given.
        available: What there is.
        called_here: What another tool's name is here, if `name` is one; meant if there is that.
    """
    known = sorted(available)
    listed = ", ".join(known) or "none"
    meant = called_here if called_here in known else nearest(name, known)
    return f"unknown {kind} {name!r}.{whether_meant(meant)} Available: {listed}."


def first_of(names: Sequence[str], most: int) -> str:
    """Names in a line: no more than so many, and how many others there are."""
    others = len(names) - most
    return ", ".join(names[:most]) + (f" and {others} more" if others > 0 else "")


def error_named(
    name: str, text: str, otherwise: type[IsotrainError] = RunFailedError
) -> IsotrainError:
    """The error that another process has told of: of the class of that name, if it is one of these."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, IsotrainError):
        return kind(text)
    return otherwise(f"{name}: {text}".strip(": "))
