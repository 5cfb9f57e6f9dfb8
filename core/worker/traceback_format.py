"""Shortened tracebacks: frames of isotrain and packages left out; the process's log has the full one."""

from __future__ import annotations

import itertools
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from isotrain.core.errors import IsotrainError

_USER = ""
_ISOTRAIN = "isotrain"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def format_traceback(error: BaseException) -> str:
    """The traceback with one line in place of each run of frames that are not user code.

    The frame that raised the error is shown too, unless the error is one of isotrain's, whose message
    suffices. An error without user code raised in isotrain itself, a defect, is shown in full.
    """
    if isinstance(error, IsotrainError) and error.__cause__ is None:
        return strip_colors("".join(_user_frames_and_message(error)))
    summary = traceback.TracebackException.from_exception(error)
    pending = [(summary, error)]
    while pending:
        summarized, exception = pending.pop()
        summarized.stack = _ShortenedStack(summarized.stack, exception)
        for linked, linked_exception in (
            (summarized.__cause__, exception.__cause__),
            (summarized.__context__, exception.__context__),
        ):
            if linked is not None and linked_exception is not None:
                pending.append((linked, linked_exception))
    return strip_colors("".join(summary.format()))


def one_line(error: BaseException) -> str:
    """The kind and the first line of an error, and the last line of user code that led to it, if any."""
    lines = strip_colors("".join(traceback.format_exception_only(error))).strip().splitlines()
    text = lines[0].removeprefix(f"{type(error).__module__}.").rstrip(".")
    places = [
        f"{Path(frame.f_code.co_filename).name}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _owner(frame) == _USER
    ]
    return f"{text} ({places[-1]})" if places else text


def _user_frames_and_message(error: BaseException) -> Iterator[str]:
    """The frames of user code, if there are any, and the message."""
    frames = traceback.StackSummary.extract(
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _owner(frame) == _USER
    )
    if frames:
        yield "Traceback (of your own code):\n"
        yield from frames.format()
    yield from traceback.format_exception_only(error)


class _ShortenedStack(traceback.StackSummary):
    """The frames of an error; formats only some of them."""

    def __init__(self, frames: traceback.StackSummary, error: BaseException) -> None:
        super().__init__(frames)
        self._owners = [_owner(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
        self._shown = _shown_indices(self._owners, user_only=isinstance(error, IsotrainError))

    def format(self, **options: Any) -> list[str]:
        """Formats the shown frames, and one line for each run of hidden ones."""
        lines: list[str] = []
        all_indices = range(min(len(self), len(self._owners)))
        for is_shown, run in itertools.groupby(all_indices, self._shown.__contains__):
            indices = list(run)
            if is_shown:
                frames = traceback.StackSummary.from_list([self[index] for index in indices])
                lines += frames.format(**options)
            else:
                owners = ", ".join(dict.fromkeys(self._owners[index] for index in indices))
                lines.append(f"  ... frames of {owners}: {len(indices)}, in the log\n")
        return lines


def _shown_indices(owners: Sequence[str], *, user_only: bool) -> set[int]:
    """Indices of the frames to show.

    Args:
        owners: Owner of each frame, outermost first.
        user_only: Whether to show frames of user code only, as the error's message says what is wrong.
    """
    user_frames = {index for index, owner in enumerate(owners) if owner == _USER}
    last = len(owners) - 1
    if user_only or last < 0:
        return user_frames
    if user_frames:
        return {*user_frames, last}
    if owners[last] == _ISOTRAIN:
        return set(range(len(owners)))
    calls = [index for index, owner in enumerate(owners) if owner == _ISOTRAIN]
    return {*calls[-1:], last}


def _owner(frame: FrameType) -> str:
    """Owner of a frame's code: the name of a package, `Python`, or an empty string for user code."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    file = frame.f_code.co_filename
    installed = ("site-packages", "dist-packages")
    if package == _ISOTRAIN or any(folder in file for folder in installed):
        return package or file
    standard_library = ("<frozen ", sysconfig.get_path("stdlib"))
    return "Python" if file.startswith(standard_library) else _USER


def strip_colors(text: str) -> str:
    """The text without ANSI colour codes, which frameworks put into messages."""
    return _COLOR.sub("", text)
