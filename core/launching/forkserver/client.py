"""Client of a fork server: a process that has imported a framework and forks the rank processes of runs.

The idea is that of multiprocessing's ``forkserver`` start method with ``set_forkserver_preload``. That one is
not used, because it has one server per program, with the environment variables that the program had when
it was started. Here ``OMP_NUM_THREADS`` and ``KERAS_BACKEND`` differ per plan and must be set before the
framework is imported, so there is one server for each environment (see `pool`). Edited modules are noticed,
and the server is replaced (`ForkServer.is_current`). A failed import is reported with the server's output,
not ignored. The kernel kills all forked processes when the launching process dies (``PR_SET_PDEATHSIG``).
"""

from __future__ import annotations

import contextlib
import os
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
from isotrain.core.system.interpreter_start import command_line, startup_line
from isotrain.core.system.process import output_tail, poll_readable
from isotrain.core.system.process_activity import activity

_MAIN = "isotrain.core.launching.forkserver.server:main"
_PACKAGE_PARENT = str(Path(sys.modules["isotrain"].__path__[0]).parent)
_POLL_SECONDS = 0.2
_ACTIVITY_SECONDS = 0.05
ANSWER_SECONDS = 5.0
"""Default limit for a fork server to accept a request and to reply; one that is suspended does neither."""
_VARIABLE_PADDING = " " * (1 << 16)
"""Space for the process context that a forked process shows in its environment, see `server`; longer ones
are cut."""


class ForkServerError(Exception):
    """A fork server cannot be used; the message says why."""


class ForkServer:
    """A fork server process, and the launcher's end of its socket.

    The fork server lives until `retire` or until this process ends. It imports with the `sys.path` that its
    interpreter starts with: never from the script's folder, nor from folders that this program has added.

    Attributes:
        is_ready: Whether the fork server has reported that its imports are done.
    """

    def __init__(
        self,
        imports: Sequence[str],
        variables: Mapping[str, str],
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Starts the fork server, and does not wait for its imports.

        Args:
            imports: Modules to import, in this order.
            variables: Complete environment of the process.
            answer_seconds: Limit to accept a request and to reply.

        Raises:
            OSError: It cannot be started.
        """
        self._answer_seconds = answer_seconds
        self._socket, child_socket = socket.socketpair()
        with child_socket, contextlib.ExitStack() as cleanup:
            cleanup.enter_context(self._socket)
            timeval = struct.pack("@ll", int(answer_seconds), int(answer_seconds % 1 * 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            self._output = cleanup.enter_context(tempfile.TemporaryFile())
            self._process = self._start_process(child_socket.fileno(), imports, variables)
            cleanup.pop_all()  # `end` closes them
        self._lock = threading.RLock()
        self._children: set[int] = set()
        """Process ids of forked processes that are not released yet."""
        self._exit_codes: dict[int, int] = {}
        """Exit codes of ended processes, by process id."""
        self._answers: list[dict[str, Any]] = []
        self.is_ready = False
        self._is_retired = False
        self._is_unresponsive = False
        self._is_gone = False

    def _start_process(
        self, child_descriptor: int, imports: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command_line(_MAIN, child_descriptor, os.getpid(), list(imports)),
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            env={**variables, VARIABLE: _VARIABLE_PADDING},
            pass_fds=[child_descriptor],
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(startup_line(extra_path=[_PACKAGE_PARENT], argv=["-c"]))
        return process

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    def is_current(self) -> bool:
        """Whether no file that it imported has changed since, so that a new fork server would be the same."""
        with self._lock, contextlib.suppress(ForkServerError):
            self._read(0)
            if self.is_ready:
                return not self._request({"changed": []}, self._answer_seconds)["changed"]
            return not self._is_gone
        return False

    def fork(
        self, arguments: ProcessArgs, idle_seconds: float, import_seconds: float
    ) -> ForkedProcess:
        """Waits for the imports, and forks a rank process.

        Args:
            arguments: Environment and descriptors of the new process.
            idle_seconds: Limit without any CPU time or reading while it imports, and limit for its reply.
            import_seconds: Limit for the imports.

        Raises:
            ForkServerError: It could not import, cannot fork, or is gone.
        """
        working_directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            with self._lock:
                self._await_imports(idle_seconds, import_seconds)
                descriptors = (*arguments.streams, *arguments.inherited, working_directory)
                request = {"fork": dict(arguments.variables)}
                answer = self._request(request, idle_seconds, descriptors)
                if "refused" in answer:
                    raise ForkServerError(f"it cannot fork: {answer['refused']}")
                self._children.add(answer["forked"])
        finally:
            os.close(working_directory)
        return ForkedProcess(answer["forked"], self)

    def exit_code(self, pid: int) -> int | None:
        """Exit code of a forked process; None while it runs. All are killed when the fork server dies."""
        with self._lock:
            self._read(0)
            return self._exit_codes.get(pid, -signal.SIGKILL if self._is_gone else None)

    def release(self, pid: int) -> None:
        """Reaps an ended process. A retired fork server ends with the last of its processes."""
        with self._lock:
            with contextlib.suppress(ForkServerError):
                self._request({"release": pid}, self._answer_seconds)
            self._children.remove(pid)
            self._exit_codes.pop(pid, None)
            self._end_if_idle()

    def retire(self) -> None:
        """Ends the fork server as soon as none of its processes is left."""
        with self._lock:
            self._is_retired = True
            self._end_if_idle()

    def forget(self) -> None:
        """Closes the descriptors in a process forked from this one, which does not own the fork server."""
        self._is_gone = True
        self._process.returncode = 0  # no child of this process: must not be waited for
        self._socket.close()
        self._output.close()

    def _end_if_idle(self) -> None:
        if self._is_retired and not self._children:
            self.end()

    def end(self) -> None:
        """Kills the fork server at once, and with it all processes that it forked."""
        self._is_gone = self._is_retired = True
        self._process.kill()
        self._process.wait()
        self._socket.close()
        self._output.close()

    def _await_imports(self, idle_seconds: float, import_seconds: float) -> None:
        started = active_at = time.monotonic()
        last_activity = 0.0
        while not self.is_ready:
            self._read(_POLL_SECONDS)
            now = time.monotonic()
            if (current := activity(self.pid)) - last_activity >= _ACTIVITY_SECONDS:
                last_activity, active_at = current, now
            if self._is_retired:
                raise ForkServerError("it was ended while it imported")
            if self._is_gone:
                raise ForkServerError(
                    f"it ended while it imported; its output: {self._output_tail()}"
                )
            if now - active_at > idle_seconds or now - started > import_seconds:
                self._process.kill()
                raise ForkServerError(f"it was not ready after {now - started:.0f} s")

    def _request(
        self, request: Mapping[str, Any], timeout: float, descriptors: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Sends a request and waits for its reply.

        After a timeout no more requests are sent: a late reply would be taken for that of another request.
        Its running processes are left alone.
        """
        if self._is_gone or self._is_unresponsive:
            raise ForkServerError("it is gone, or does not answer")
        deadline = Deadline(timeout)
        try:
            message = protocol.encode(request)
            sent = socket.send_fds(self._socket, [message], list(descriptors))
            self._socket.sendall(message[sent:])
            while not self._answers and not self._is_gone and not deadline.is_over:
                self._read(_POLL_SECONDS)
            return self._answers.pop()
        except (OSError, IndexError) as error:
            self._stop_requests()
            raise ForkServerError("it is gone, or does not answer") from error
        except BaseException:
            self._stop_requests()
            raise

    def _stop_requests(self) -> None:
        """Sends no more requests; the fork server ends with the last of its processes."""
        self._is_unresponsive = True
        self.retire()

    def _read(self, timeout: float) -> None:
        """Handles all messages received so far; waits at most `timeout` seconds for the first."""
        while not self._is_gone and poll_readable([self._socket.fileno()], timeout):
            try:
                received = protocol.receive(self._socket)
            except OSError:
                received = None
            except BaseException:
                self._process.kill()  # half of a message has been read
                raise
            if received is None:
                self._is_gone = True
            else:
                self._handle_message(received[0])
            timeout = 0

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.is_ready = True
        elif "ended" in message:
            self._exit_codes[message["ended"]] = message["code"]
        else:
            self._answers.append(message)

    def _output_tail(self) -> str:
        """The last lines of its output, joined into one."""
        self._output.seek(0)
        return output_tail(self._output.read().decode(errors="replace"))


class ForkedProcess:
    """A process that a fork server has forked; a `ProcessHandle`.

    Attributes:
        pid: Process id.
    """

    def __init__(self, pid: int, fork_server: ForkServer) -> None:
        self.pid = pid
        self._fork_server = fork_server

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs, negative if a signal ended it."""
        return self._fork_server.exit_code(self.pid)

    def release(self) -> None:
        """Reaps the process, once it has ended."""
        self._fork_server.release(self.pid)
