"""Calls a function in a new interpreter, and reads its return value, its error, or how the process ended."""

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
from isotrain.core.system.interpreter_start import (
    command_line,
    is_in_prefix,
    load_function,
    startup_line,
)
from isotrain.core.system.process import exit_code, output_tail, signal_name, wait_for_end

END_SECONDS = 10.0
"""Time for a child to end by itself before it is killed."""
_MAIN = "isotrain.core.system.subprocess_call:main"


class ChildRaisedError(Exception):
    """The function raised an error.

    Attributes:
        kind: Class name of the error.
        message: Text of the error.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}".strip(": "))
        self.kind = kind
        self.message = message


class ChildEndedError(Exception):
    """The process ended before it returned a value or an error.

    Attributes:
        how: Kind of its end, such as `by SIGABRT` or `with exit code 3`.
        output: The last lines of its output, joined into one; "nothing" if there are none.
    """

    def __init__(self, how: str, output: str) -> None:
        super().__init__(f"it ended {how}; its output: {output}")
        self.how = how
        self.output = output


class ChildProcess:
    """A new interpreter, in its own session, that calls one function with a JSON value.

    It has this program's `sys.argv`, which user modules may read when they are imported. It ends when this
    process is gone: first as by Ctrl-C, so that processes which it has started are ended too.

    Attributes:
        log: File with its standard output and error.
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
        """Starts the interpreter.

        Args:
            function: `module:name` of the function.
            value: Argument of the function, a JSON value.
            files: Path to which `.json` is appended for its answer, and `.log` for its log.
            python: Interpreter of another environment, which imports from there, and then from the folders
                outside of this program's environment; None: this interpreter with the same `sys.path`.
            variables: Environment variables to set besides those of this process.
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
        extra_path = None if python is None else _user_folders()
        self._send(startup_line(function, value, str(self._answer), extra_path=extra_path))

    def _send(self, call: bytes) -> None:
        """Sends the startup line. The pipe stays open: its end shows the child that this process is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(call)
            self._process.stdin.flush()

    @property
    def seconds(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return exit_code(self._process) is not None

    def wait(self) -> None:
        """Waits until it has ended."""
        wait_for_end(self._process)

    def end(self, timeout: float = 0.0) -> None:
        """Kills its process group and reaps it; must be called also after it has ended by itself.

        Args:
            timeout: Seconds after SIGTERM in which it can end the processes that it has started.
        """
        if self._process.returncode is None:  # not reaped: its process id is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if timeout and not self.is_done:
                    os.kill(self._process.pid, signal.SIGTERM)
                    wait_for_end(self._process, timeout)
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def answer(self) -> Any:
        """The function's return value. Call it once the process has ended.

        Raises:
            ChildRaisedError: The function raised an error.
            ChildEndedError: The process ended before it returned.
        """
        try:
            answer = json.loads(self._answer.read_text(encoding="utf-8"))
        except FileNotFoundError:
            output = output_tail(self.log.read_text(encoding="utf-8", errors="replace"))
            code = exit_code(self._process)
            assert code is not None, "answer() before the process has ended"
            raise ChildEndedError(_describe_exit(code), output) from None
        self._answer.unlink()
        if "raised" in answer:
            raise ChildRaisedError(answer["raised"], answer["message"])
        return answer["returned"]


def _describe_exit(code: int) -> str:
    return f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"


def _user_folders() -> Sequence[str]:
    """Folders of `sys.path` outside of the interpreter's prefix: those of user modules."""
    return [each for each in map(os.path.abspath, sys.path) if not is_in_prefix(each)]


def main(function: str, value: Any, answer: str) -> NoReturn:
    """Main program of the child: calls the function, writes the answer file atomically, and exits."""
    signal.signal(signal.SIGTERM, _unwind)
    is_orphan = threading.Event()
    threading.Thread(target=_end_with_caller, args=(_take_stdin(), is_orphan), daemon=True).start()
    try:
        atomic_write(Path(answer), json.dumps(_call(function, value), default=str))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if is_orphan.is_set():
            _end_group()
    os._exit(0)  # frameworks that are half loaded may crash or hang when they are torn down


def _take_stdin() -> int:
    """Duplicates the pipe to the caller, and gives the function and its children `/dev/null` as input."""
    pipe = os.dup(sys.stdin.fileno())
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), sys.stdin.fileno())
    return pipe


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler that raises KeyboardInterrupt, so that the function ends what it has started."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_caller(pipe: int, is_orphan: threading.Event) -> None:
    """Thread: waits until the caller is gone, then ends this process and its process group."""
    while os.read(pipe, 1):
        pass
    is_orphan.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    _end_group()


def _end_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _call(function: str, value: Any) -> dict[str, Any]:
    try:
        return {"returned": load_function(function)(value)}
    except Exception as error:
        traceback.print_exc()
        return {"raised": type(error).__name__, "message": str(error)}
