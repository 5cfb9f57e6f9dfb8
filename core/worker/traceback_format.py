"""What is shown of an error that has ended a process of a run; its log has the whole."""

from __future__ import annotations

import itertools
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from isotrain.core.errors import IsotrainError

_OWN = ""
_ISOTRAIN = "isotrain"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def format_traceback(error: BaseException) -> str:
    """The traceback, with a line in the place of frames that are not the person's own.

    Where an error was raised is shown too, whoever's code that is; but not of isotrain's errors that say by
    themselves what is wrong. A defect of isotrain is shown whole.
    """
    if isinstance(error, IsotrainError) and error.__cause__ is None:
        return strip_colors("".join(_told(error)))
    found = traceback.TracebackException.from_exception(error)
    pending = [(found, error)]
    while pending:
        each, of = pending.pop()
        each.stack = _Shortened(each.stack, of)
        for told, before in (
            (each.__cause__, of.__cause__),
            (each.__context__, of.__context__),
        ):
            if told is not None and before is not None:
                pending.append((told, before))
    return strip_colors("".join(found.format()))


def _told(error: BaseException) -> Iterator[str]:
    """The person's own frames, if there are any, and the text."""
    frames = traceback.StackSummary.extract(
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _owner(frame) == _OWN
    )
    if frames:
        yield "Traceback (of your own code):\n"
        yield from frames.format()
    yield from traceback.format_exception_only(error)


class _Shortened(traceback.StackSummary):
    """The frames of an error, of which only some are shown."""

    def __init__(self, frames: traceback.StackSummary, error: BaseException) -> None:
        super().__init__(frames)
        self._owners = [_owner(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
        self._kept = _kept(self._owners, says_all=isinstance(error, IsotrainError))

    def format(self, **options: Any) -> list[str]:
        """As text, frame by frame."""
        lines: list[str] = []
        places = range(min(len(self), len(self._owners)))
        for is_kept, run in itertools.groupby(places, self._kept.__contains__):
            own = list(run)
            if is_kept:
                frames = traceback.StackSummary.from_list([self[place] for place in own])
                lines += frames.format(**options)
            else:
                owners = ", ".join(dict.fromkeys(self._owners[place] for place in own))
                lines.append(f"  ... frames of {owners}: {len(own)}, in the log\n")
        return lines


def _kept(owners: Sequence[str], *, says_all: bool) -> set[int]:
    """The places of the frames that are shown.

    Args:
        owners: Of all frames.
        says_all: Whether the error's text says what is wrong, so that only the person's own frames are shown.
    """
    own = {place for place, owner in enumerate(owners) if owner == _OWN}
    last = len(owners) - 1
    if says_all or last < 0:
        return own
    if own:
        return {*own, last}
    if owners[last] == _ISOTRAIN:
        return set(range(len(owners)))
    calls = [place for place, owner in enumerate(owners) if owner == _ISOTRAIN]
    return {*calls[-1:], last}


def _owner(frame: FrameType) -> str:
    """Whose code a frame is in: the name of a package, or nothing for the person's own."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    file = frame.f_code.co_filename
    installed = ("site-packages", "dist-packages")
    if package == _ISOTRAIN or any(folder in file for folder in installed):
        return package or file
    of_python = ("<frozen ", sysconfig.get_path("stdlib"))
    return "Python" if file.startswith(of_python) else _OWN


def strip_colors(text: str) -> str:
    """The text without the colours that frameworks give theirs for a terminal."""
    return _COLOUR.sub("", text)
