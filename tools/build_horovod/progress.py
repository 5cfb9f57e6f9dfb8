"""Run a long step with one line about it on the screen and its full output in a log file.

In a terminal the line is rewritten every second, with the time that the step takes and what it is at.
Elsewhere there is a line when it begins and one when it ends, and others in between if asked for.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

TERMINAL_PERIOD_S = 1.0


@dataclass(frozen=True)
class Step:
    """Something to run.

    Attributes:
        title: Beginning of the line on the screen.
        command: Program and its arguments; no shell is involved.
        detail: Pattern of output lines that tell the progress: the groups that match are shown.
        note: Note on what to expect, shown until the output tells the progress.
        plain_period_s: Seconds between lines where there is no terminal; None: no lines in between.
    """

    title: str
    command: Sequence[str]
    detail: re.Pattern[str]
    note: str = ""
    plain_period_s: float | None = None


class _Line:
    """The line about one step."""

    def __init__(self, step: Step, stream: TextIO) -> None:
        self._step = step
        self._stream = stream
        self._terminal = stream.isatty()
        self._began = time.monotonic()
        self._detail = f"  {step.note}" if step.note else ""
        self.period_s = TERMINAL_PERIOD_S if self._terminal else step.plain_period_s

    def begin(self) -> None:
        """Say what begins."""
        self._write(" ...", self._detail)

    def read(self, line: str) -> None:
        """Take over what the step is at from a line of its output."""
        if match := self._step.detail.search(line):
            self._detail = "  " + " ".join(filter(None, match.groups()))

    def show(self) -> None:
        """Say how long it has been going on, and what it is at."""
        self._write(f" ... {self._elapsed()}", self._detail)

    def end(self, outcome: str) -> None:
        """Say how it ended."""
        self._write(f" ... {outcome}{self._elapsed()}")
        if self._terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _elapsed(self) -> str:
        return duration(time.monotonic() - self._began)

    def _write(self, state: str, detail: str = "") -> None:
        if self._terminal:
            room = shutil.get_terminal_size().columns - 1
            text = f"{self._step.title[: max(0, room - len(state))]}{state}{detail}"
            self._stream.write(f"\r\x1b[K{text[:room]}")
        else:
            self._stream.write(f"{self._step.title}{state}{detail}\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """A time as people read it: `1 min 02 s`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def run_logged(
    step: Step, log: Path, variables: Mapping[str, str], stream: TextIO | None = None
) -> int:
    """Run a step, show its progress, append all its output to a log file.

    Whatever ends this early ends the step's processes first.

    Args:
        step: Step to run.
        log: The file that receives standard output and error.
        variables: All of the command.
        stream: Stream for the line; left out: standard error.

    Returns:
        The exit status.
    """
    line = _Line(step, stream or sys.stderr)
    ended = threading.Event()
    ticker = threading.Thread(target=_tick, args=(line, ended), daemon=True)
    outcome = "interrupted after "
    line.begin()
    ticker.start()
    try:
        status = _run(step.command, log, variables, line)
        outcome = "failed after " if status else ""
    finally:
        ended.set()
        ticker.join()
        line.end(outcome)
    return status


def _tick(line: _Line, ended: threading.Event) -> None:
    while not ended.wait(line.period_s):
        line.show()


def _run(command: Sequence[str], log: Path, variables: Mapping[str, str], line: _Line) -> int:
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(variables),
            start_new_session=True,
            text=True,
            errors="replace",
        ) as process:
            try:
                for text in process.stdout or ():
                    file.write(text)
                    file.flush()
                    line.read(text)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)  # pip, CMake, make and the compilers
                process.wait()
                raise
    return process.returncode
