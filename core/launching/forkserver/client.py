"""A template: a process that has imported a framework, from which those of runs are forked."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.core.contracts.process import VARIABLE
from isotrain.core.launching.forkserver import protocol
from isotrain.core.launching.forkserver.process_handle import ProcessArgs
from isotrain.core.system.deadline import Deadline
from isotrain.core.system.interpreter import command_line, first_line
from isotrain.core.system.process import last_words
from isotrain.core.system.process_activity import activity

_MAIN = "isotrain.core.launching.forkserver.server:main"
_HOME = str(Path(sys.modules["isotrain"].__path__[0]).parent)
_LOOK_SECONDS = 0.2
_EFFORT_SECONDS = 0.05
ANSWER_SECONDS = 5.0
"""In which one takes a request and answers it; one that is suspended does neither."""
_ROOM = " " * (1 << 16)
"""Where a forked process shows its place, see `template_process`; longer ones are cut."""


class ForkServerError(Exception):
    """A template cannot be used; says why."""


class ForkServer:
    """The launcher's end of a template, which lives until `retire` or until this process ends.

    The template imports with the path that its interpreter starts with: never a module of the
    script's folder, nor from where this program has added.

    Attributes:
        is_ready: Whether it has been heard to have imported everything.
    """

    def __init__(
        self,
        imports: Sequence[str],
        variables: Mapping[str, str],
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Starts it, and does not wait for it.

        Args:
            imports: Modules to import.
            variables: All of its variables.
            answer_seconds: In which it takes a request and answers it.
        """
        self._answer_seconds = answer_seconds
        self._door, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undoing:
            undoing.enter_context(self._door)
            limit = struct.pack("@ll", int(answer_seconds), int(answer_seconds % 1 * 1_000_000))
            self._door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._said = undoing.enter_context(tempfile.TemporaryFile())
            self._process = self._started(theirs.fileno(), imports, variables)
            undoing.pop_all()  # `end` closes them
        self._lock = threading.RLock()
        self._living: set[int] = set()
        """Processes that were not released yet."""
        self._codes: dict[int, int] = {}
        """How processes have ended, by number."""
        self._answers: list[dict[str, Any]] = []
        self.is_ready = False
        self._is_retired = False
        self._is_mute = False
        self._is_gone = False

    def _started(
        self, door: int, imports: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command_line(_MAIN, door, os.getpid(), list(imports)),
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._said,
            env={**variables, VARIABLE: _ROOM},
            pass_fds=[door],
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as told:
            told.write(first_line(beside=[_HOME], argv=["-c"]))
        return process

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def is_current(self) -> bool:
        """Whether it still is what a new one would be: no file that it imported has changed."""
        with self._lock, contextlib.suppress(ForkServerError):
            self._read(0)
            if self.is_ready:
                return not self._asked({"changed": []}, self._answer_seconds)["changed"]
            return not self._is_gone
        return False

    def fork(self, beginning: ProcessArgs, silence: float, limit: float) -> ForkedProcess:
        """Forks a process.

        Args:
            beginning: What to give it.
            silence: Seconds in which the template may do nothing at all while it imports.
            limit: Seconds that it may import.

        Raises:
            ForkServerError: It could not import, cannot fork, or is gone.
        """
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            with self._lock:
                self._await_imports(silence, limit)
                descriptors = (*beginning.streams, *beginning.inherited, folder)
                request = {"fork": dict(beginning.variables)}
                answer = self._asked(request, silence, descriptors)
                if "refused" in answer:
                    raise ForkServerError(f"it cannot fork: {answer['refused']}")
                self._living.add(answer["forked"])
        finally:
            os.close(folder)
        return ForkedProcess(answer["forked"], self)

    def exit_code(self, pid: int) -> int | None:
        """Of a process that it forked: when the template dies, the system kills them all."""
        with self._lock:
            self._read(0)
            return self._codes.get(pid, -signal.SIGKILL if self._is_gone else None)

    def release(self, pid: int) -> None:
        """Lets the system forget a process, once it has ended; the last one may free the template."""
        with self._lock:
            with contextlib.suppress(ForkServerError):
                self._asked({"release": pid}, self._answer_seconds)
            self._living.remove(pid)
            self._codes.pop(pid, None)
            self._end_if_idle()

    def retire(self) -> None:
        """Ends it as soon as none of its processes is left."""
        with self._lock:
            self._is_retired = True
            self._end_if_idle()

    def forget(self) -> None:
        """Lets go of it in a process that was forked from this one, and does not own it."""
        self._is_gone = True
        self._process.returncode = 0  # nobody's child here: not to be waited for
        self._door.close()
        self._said.close()

    def _end_if_idle(self) -> None:
        if self._is_retired and not self._living:
            self.end()

    def end(self) -> None:
        """Ends it at once, and all that it forked with it; it has nothing to lose."""
        self._is_gone = self._is_retired = True
        self._process.kill()
        self._process.wait()
        self._door.close()
        self._said.close()

    def _await_imports(self, silence: float, limit: float) -> None:
        began = active = time.monotonic()
        done = 0.0
        while not self.is_ready:
            self._read(_LOOK_SECONDS)
            now = time.monotonic()
            if (more := activity(self.pid)) - done >= _EFFORT_SECONDS:
                done, active = more, now
            if self._is_retired:
                raise ForkServerError("it was ended while it imported")
            if self._is_gone:
                raise ForkServerError(f"it ended while it imported; it said: {self._words()}")
            if now - active > silence or now - began > limit:
                self._process.kill()
                raise ForkServerError(f"it was not ready after {now - began:.0f} s")

    def _asked(
        self, request: Mapping[str, Any], patience: float, descriptors: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Where none comes, nothing can be asked any more: a late answer would be taken for that of
        another request. Processes that live on it are left alone.
        """
        if self._is_gone or self._is_mute:
            raise ForkServerError("it is gone, or does not answer")
        waiting = Deadline(patience)
        try:
            protocol.send(self._door, request, descriptors)
            while not self._answers and not self._is_gone and not waiting.is_over:
                self._read(_LOOK_SECONDS)
            return self._answers.pop()
        except (OSError, IndexError) as error:
            self._silence()
            raise ForkServerError("it is gone, or does not answer") from error
        except BaseException:
            self._silence()
            raise

    def _silence(self) -> None:
        """Asks it nothing any more, and ends it with the last process that lives on it."""
        self._is_mute = True
        self.retire()

    def _read(self, patience: float) -> None:
        """Takes over what it has told, waiting at most so many seconds for the first of it."""
        while not self._is_gone and _is_readable(self._door, patience):
            try:
                received = protocol.receive(self._door)
            except OSError:
                received = None
            except BaseException:
                self._process.kill()  # half of a message has been read
                raise
            if received is None:
                self._is_gone = True
            else:
                self._note(received[0])
            patience = 0

    def _note(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.is_ready = True
        elif "ended" in message:
            self._codes[message["ended"]] = message["code"]
        else:
            self._answers.append(message)

    def _words(self) -> str:
        """The end of what it has said, in one line."""
        self._said.seek(0)
        return last_words(self._said.read().decode(errors="replace"))


def _is_readable(door: socket.socket, patience: float) -> bool:
    poll = select.poll()
    poll.register(door, select.POLLIN)
    return bool(poll.poll(patience * 1000))


class ForkedProcess:
    """A process that a template has forked.

    Attributes:
        pid: Its number.
    """

    def __init__(self, pid: int, template: ForkServer) -> None:
        self.pid = pid
        self._template = template

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._template.exit_code(self.pid)

    def release(self) -> None:
        """Lets the system forget it, once it has ended."""
        self._template.release(self.pid)
