"""Errors that isotrain raises for its users, and texts such as "did you mean"."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

_MOST_MEANT = 3
"""Number of names up to which a question asks whether one of them was meant."""
_WORD = re.compile(r"[^\W_]+")


class IsotrainError(Exception):
    """Base class of every error that isotrain raises on purpose; the message says what to do."""


class SpecError(IsotrainError):
    """The training spec is invalid; the message lists every problem with its field path."""


class PlanError(IsotrainError):
    """The spec is valid but cannot run as requested: backend, strategy and replicas do not fit together."""


class ClusterInfoError(IsotrainError):
    """The rank of this process is unclear: incomplete variables of a launcher, or conflicting launchers."""


class UnsupportedError(PlanError):
    """A backend or launcher does not support the request, as it declares."""


class BackendUnavailableError(PlanError):
    """The requested backend is not available in this environment; the message has the install hint."""


class DataError(IsotrainError):
    """A data source does not return what the run needs."""


class CheckpointError(IsotrainError):
    """A checkpoint cannot be written or read, or is damaged; the message names the file."""


class PluginError(IsotrainError):
    """A plugin is broken, or two plugins register the same name."""


class RunFailedError(IsotrainError):
    """A run failed; the message names the rank, the step and the call, and has the traceback.

    Attributes:
        steps_done: Steps of the process that came furthest; None if no process has reported any.
        was_asked: Whether the run ended by request.
        lost_host: Host that was lost with all its ranks while others were not; None if there is none.
        result: Return value of `run` or `launch` if only the run's files could not be written; else None.
    """

    steps_done: int | None = None
    was_asked = False
    lost_host: str | None = None
    result: Any = None


class NotANumberError(RunFailedError):
    """A loss was NaN; the message names the step, and the likely cause."""


class ValuesNeededError(RunFailedError):
    """A plan that is made without values of tensors cannot go on without them.

    Attributes:
        reason: What took values, and where.
    """

    reason = ""


class EndedError(RunFailedError):
    """The run ended by request, after a checkpoint."""

    was_asked = True


class PeerLostError(RunFailedError):
    """Another rank is gone, has failed, or did not reach the rendezvous; this one is not the cause."""


def nearest(name: str, available: Iterable[str]) -> str | None:
    """The available name that is most similar to a misspelled one, ignoring case; None if none is similar.

    Names that begin with `__` are left out. The first of these rules that finds a name decides:

    1. The name that is nearly equal: `epochs` for `epoch`, not `epoch_steps`.
    2. The name that has all words of `name` and the fewest others: `sparse_categorical_accuracy` for
       `sparse_accuracy`. If several have as few (`mean_squared_error` and `mean_absolute_error` for
       `mean`), it is None. Words joined to one count too: `binary_crossentropy` has `cross_entropy`.
    3. The most similar name that is similar enough; otherwise one of the same letters: `lr` for `rl`.
    """
    by_lower_case = {each.lower(): each for each in available if not each.startswith("__")}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, by_lower_case, n=1, cutoff=0.9) or None
    if near is None:
        near = _matches_by_words(wanted, by_lower_case)
    if near is None:
        same_letters = (each for each in by_lower_case if sorted(each) == sorted(wanted))
        near = difflib.get_close_matches(wanted, by_lower_case, n=1) or [*same_letters]
    return by_lower_case[near[0]] if near else None


def _matches_by_words(name: str, available: Iterable[str]) -> list[str] | None:
    """The name with all words of `name` and the fewest others; empty if ambiguous; None if there is none."""
    words = set(_WORD.findall(name))
    if not words:
        return None
    parts = {each: set(_WORD.findall(each)) for each in available}
    joined = "".join(_WORD.findall(name))
    others = {n: len(p) - len(words) for n, p in parts.items() if words <= p or joined in p}
    if not others:
        return None
    fewest = [each for each, count in others.items() if count == min(others.values())]
    return fewest if len(fewest) == 1 else []


def did_you_mean(name: str, available: Iterable[str]) -> str:
    """The text " Did you mean 'x'?" with the most similar available name; empty if none is similar."""
    return whether_meant(nearest(name, available))


def whether_meant(name: str | None, begins: str = " Did") -> str:
    """The text "{begins} you mean 'x'?"; empty if `name` is None."""
    return f"{begins} you mean {name!r}?" if name else ""


def unknown_name(
    kind: str, name: str, available: Iterable[str], *, called_here: str | None = None
) -> str:
    """The message for an unknown name, with a suggestion and the available names.

    Args:
        kind: Noun for the message, such as "backend".
        name: The unknown name.
        available: Available names.
        called_here: isotrain's name for a name of another tool; suggested if it is available.
    """
    names = sorted(available)
    listed = ", ".join(names) or "none"
    meant = called_here if called_here in names else nearest(name, names)
    question = whether_meant(meant) if meant else _whether_any_meant(_with_word(name, names))
    return f"unknown {kind} {name!r}.{question} Available: {listed}."


def _with_word(name: str, available: Sequence[str]) -> list[str]:
    """Available names of which one word, between hyphens, begins with `name`: `torch` in `torch-ddp`."""
    return [
        each for each in available if any(part.startswith(name.lower()) for part in each.split("-"))
    ]


def _whether_any_meant(names: Sequence[str]) -> str:
    """A question with up to three names; empty without any, or with more."""
    if not 0 < len(names) <= _MOST_MEANT:
        return ""
    *others, last = (repr(name) for name in names)
    return f" Did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def first_of(names: Sequence[str], most: int) -> str:
    """At most `most` names, separated by commas, and the number of the others."""
    others = len(names) - most
    return ", ".join(names[:most]) + (f" and {others} more" if others > 0 else "")


def error_named(
    name: str, text: str, otherwise: type[IsotrainError] = RunFailedError
) -> IsotrainError:
    """Recreates an error of another process from its class name and text.

    Args:
        name: Class name of the error.
        text: Text of the error.
        otherwise: Class to use if `name` is no class of this module.
    """
    error_class = globals().get(name)
    if isinstance(error_class, type) and issubclass(error_class, IsotrainError):
        return error_class(text)
    return otherwise(f"{name}: {text}".strip(": "))
