"""Calling a function in an interpreter of its own: what it returns comes back, or how it ended instead."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from isotrain.core.system.files import atomic_write
from isotrain.core.system.interpreter import (
    command_line,
    first_line,
    is_of_interpreter,
    load_function,
)
from isotrain.core.system.process import exit_code, last_words, signal_name, wait_for_end

END_SECONDS = 10.0
"""What a process has to end by itself before it is killed."""
_MAIN = "isotrain.core.system.subprocess_call:main"


class ChildRaisedError(Exception):
    """The function raised an error.

    Attributes:
        kind: The name of its class.
        message: Its text.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}".strip(": "))
        self.kind = kind
        self.message = message


class ChildEndedError(Exception):
    """The process ended before it answered.

    Attributes:
        how: Such as `by SIGABRT` or `with exit code 3`.
        said: The last lines of what it wrote, as one; "nothing" if there are none.
    """

    def __init__(self, how: str, said: str) -> None:
        super().__init__(f"it ended {how}; it said: {said}")
        self.how = how
        self.said = said


class ChildProcess:
    """An interpreter, in a session of its own, that calls one function with plain values.

    It sees this program's `sys.argv`, which modules of a person may read when they are imported, and
    ends when this process is gone: first like Ctrl-C, so that what it has started is ended too.

    Attributes:
        log: The file with what it writes.
    """

    def __init__(
        self,
        function: str,
        value: Any,
        files: Path,
        *,
        python: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it.

        Args:
            function: `module:name` of what to call.
            value: Its argument, of JSON.
            files: Its answer and its log are written to this path with the endings `.json` and `.log`.
            python: Another environment's interpreter, which imports what it finds there, and else what
                this program finds outside of its own environment; None: this one with the same path.
            variables: Set for it, beside this process's own.
        """
        self._answer = files.with_name(f"{files.name}.json")
        self.log = files.with_name(f"{files.name}.log")
        self._started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command_line(_MAIN, python=python),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **(variables or {})},
                start_new_session=True,
            )
        beside = None if python is None else _own_folders()
        self._tell(first_line(function, value, str(self._answer), beside=beside))

    def _tell(self, call: bytes) -> None:
        """Hands the call over; the pipe stays open, and its end tells that this process is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(call)
            self._process.stdin.flush()

    @property
    def seconds(self) -> float:
        """How long ago it was started."""
        return time.monotonic() - self._started

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return exit_code(self._process) is not None

    def wait(self) -> None:
        """Returns when it has ended."""
        wait_for_end(self._process)

    def end(self, patience: float = 0.0) -> None:
        """Ends it and its process group for sure; call it also when it has ended by itself.

        Args:
            patience: Seconds that it has to end what it has started.
        """
        if self._process.returncode is None:  # its number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if patience and not self.is_done:
                    os.kill(self._process.pid, signal.SIGTERM)
                    wait_for_end(self._process, patience)
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def answer(self) -> Any:
        """What the function returned; once the process has ended.

        Raises:
            ChildRaisedError: It raised an error.
            ChildEndedError: The process ended before it returned.
        """
        try:
            answer = json.loads(self._answer.read_text(encoding="utf-8"))
        except FileNotFoundError:
            said = last_words(self.log.read_text(encoding="utf-8", errors="replace"))
            code = exit_code(self._process)
            assert code is not None, "call it when the process has ended"
            raise ChildEndedError(_ending(code), said) from None
        self._answer.unlink()
        if "raised" in answer:
            raise ChildRaisedError(answer["raised"], answer["message"])
        return answer["returned"]


def _ending(code: int) -> str:
    return f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"


def _own_folders() -> Sequence[str]:
    """Where this program finds modules that belong to no environment: a person's own."""
    return [each for each in map(os.path.abspath, sys.path) if not is_of_interpreter(each)]


def main(function: str, value: Any, answer: str) -> NoReturn:
    """The child's program: calls the function, writes its answer whole, and ends."""
    signal.signal(signal.SIGTERM, _unwind)
    is_orphan = threading.Event()
    threading.Thread(
        target=_end_with_the_caller, args=(_take_stdin(), is_orphan), daemon=True
    ).start()
    try:
        atomic_write(Path(answer), json.dumps(_attempt(function, value), default=str))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if is_orphan.is_set():
            _end_group()
    os._exit(0)  # frameworks that are half loaded may crash or hang when they are torn down


def _take_stdin() -> int:
    """Keeps the pipe to the caller from what the function runs, for which there is no input."""
    pipe = os.dup(sys.stdin.fileno())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    return pipe


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    """Ends like Ctrl-C, so that what the function has started is ended too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_the_caller(pipe: int, is_orphan: threading.Event) -> None:
    """Waits until the caller is gone, whatever this process does meanwhile."""
    while os.read(pipe, 1):
        pass
    is_orphan.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    _end_group()


def _end_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _attempt(function: str, value: Any) -> dict[str, Any]:
    try:
        return {"returned": load_function(function)(value)}
    except Exception as error:
        traceback.print_exc()
        return {"raised": type(error).__name__, "message": str(error)}
