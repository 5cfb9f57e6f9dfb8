"""Run a long build with its progress on the screen and its full output in a log file."""

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
from pathlib import Path
from typing import TextIO

_STEP = re.compile(r"\[\s*(\d+)%\] (?:Building|Linking) \S+ .*?([^/\s]+)\s*$")
_PLAIN_PERIOD_S = 15.0
_TERMINAL_PERIOD_S = 1.0


class _Display:
    """One line that is rewritten in a terminal; a new line now and then elsewhere."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title = title
        self._stream = stream
        self._terminal = stream.isatty()
        self._began = time.monotonic()
        self._step = "starting"
        self.period_s = _TERMINAL_PERIOD_S if self._terminal else _PLAIN_PERIOD_S

    def read(self, line: str) -> None:
        """Take over percentage and file from a line of CMake's output."""
        if match := _STEP.search(line):
            self._step = f"{match[1]:>3}% {match[2]}"

    def show(self) -> None:
        """Print the present state."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        text = f"{self._title}  {minutes}:{seconds:02}  {self._step}"
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[K{text[: columns - 1]}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Print the last state and end the line."""
        self.show()
        if self._terminal:
            self._stream.write("\n")
            self._stream.flush()


def run_logged(
    title: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> int:
    """Run a command, show its progress, append all its output to a log file.

    Args:
        title: What the line on the screen begins with.
        command: The program and its arguments; no shell is involved.
        log: The file that receives standard output and error.
        environment: The whole environment of the command.

    Returns:
        The exit status.
    """
    display = _Display(title, sys.stderr)
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(display.period_s):
            display.show()

    ticker = threading.Thread(target=tick, daemon=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
            text=True,
            errors="replace",
        ) as process:
            ticker.start()
            try:
                for line in process.stdout or ():
                    file.write(line)
                    file.flush()
                    display.read(line)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)  # pip, CMake, make and the compilers
                raise
            finally:
                ended.set()
                ticker.join()
                display.close()
    return process.returncode
