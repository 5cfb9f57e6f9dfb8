"""A process that works for this one over a channel, and never outlives it."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from isotrain.core.data.processes.channel import Channel
from isotrain.core.system.interpreter_start import command_line, load_function, startup_line
from isotrain.core.system.process import describe_exit, poll_readable

_F_SETSIG = 10  # from <linux/fcntl.h>
_END_SECONDS = 0.5
VARIABLES = {
    # one thread each: the other cores have workers of their own
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    # a framework in a worker would take the memory of the GPUs that train
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ""),
}

Serve = Callable[[Channel], None]
"""What the process does, with its end of the channel."""


class ChildProcess:
    """A process with a channel to it.

    The kernel kills it as soon as this process has ended, whatever either is doing: it has the reading end of
    a pipe that signals when the other end is closed. On Ctrl-C it goes on until this process ends it.

    Attributes:
        channel: This process's end of the channel.
        pid: Process id.
    """

    def __init__(self, process: Any, channel: Channel, lifeline: int) -> None:
        """Keeps a `Popen` or a multiprocessing process, and the writing end of the pipe."""
        self.channel = channel
        self.pid: int = process.pid
        self._process = process
        self._lifeline = lifeline
        _children.add(self)

    @classmethod
    def spawn(
        cls,
        serve: str,
        variables: Mapping[str, str],
        arguments: Sequence[Any] = (),
        descriptors: Sequence[int] = (),
    ) -> ChildProcess:
        """Starts a new interpreter with this one's `sys.path`.

        Args:
            serve: `module:name` of a function of the channel and the arguments.
            variables: Environment variables to set besides those of this process.
            arguments: Arguments of the function, JSON values.
            descriptors: File descriptors that the process inherits.
        """
        here, there = socket.socketpair()
        waiting, lifeline = os.pipe()
        with there, os.fdopen(waiting, "rb"):
            process = subprocess.Popen(
                command_line(f"{__name__}:main", serve, there.fileno(), waiting, arguments),
                stdin=subprocess.PIPE,
                pass_fds=(there.fileno(), waiting, *descriptors),
                env={**os.environ, **variables},
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(startup_line())
        return cls(process, Channel(here), lifeline)

    @classmethod
    def fork(cls, serve: Serve) -> ChildProcess:
        """Forks this process, with all that it has in memory.

        Threads of this process do not exist in the new one, and locks that they hold stay locked there.
        """
        here, there = socket.socketpair()
        waiting, lifeline = os.pipe()

        def run() -> None:
            here.close()
            os.close(lifeline)
            for child in _children:  # their other ends would not notice the end of this process
                child.channel.close()
                child._close_lifeline()
            _serve(serve, there, waiting)

        process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
        with there, os.fdopen(waiting, "rb"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
            process.start()
        return cls(process, Channel(here), lifeline)

    def describe_end(self) -> str:
        """The end of the process as a predicate, such as "was ended by SIGTERM"; ends it if it has not."""
        code = self._exit_code(_END_SECONDS)
        self.close()
        return "closed its channel" if code is None else describe_exit(code)

    def close(self) -> None:
        """Ends the process, which may finish within a moment what it is doing."""
        self.channel.close()
        self._exit_code(_END_SECONDS)
        self._close_lifeline()
        self._process.kill()
        self._exit_code(None)
        _children.discard(self)

    def _exit_code(self, seconds: float | None) -> int | None:
        """Waits for the end of the process for so many seconds (None: no limit); None if it has not ended."""
        if isinstance(self._process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(seconds)
            return None
        self._process.join(seconds)
        code: int | None = self._process.exitcode
        return code

    def _close_lifeline(self) -> None:
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)


_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def close_all(children: Iterable[ChildProcess]) -> None:
    """Ends processes, all at the same time."""
    children = list(children)
    for child in children:
        child.channel.close()
    end = time.monotonic() + _END_SECONDS
    for child in children:
        child._exit_code(max(0.0, end - time.monotonic()))
    for child in children:
        child._close_lifeline()
    for child in children:
        child.close()


def main(serve: str, connection: int, waiting: int, arguments: Sequence[Any]) -> None:
    """The main program of a spawned process."""
    _serve(
        lambda channel: load_function(serve)(channel, *arguments),
        socket.socket(fileno=connection),
        waiting,
    )


def _serve(serve: Serve, connection: socket.socket, waiting: int) -> None:
    """Runs the process, and exits; an error that it raises is shown, and closes the channel."""
    _end_with_writer(waiting)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches it too
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 1
    try:
        serve(Channel(connection))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _end_with_writer(waiting: int) -> None:
    """Has the kernel kill this process when nobody has the writing end of a pipe any more.

    `PR_SET_PDEATHSIG` acts at the end of the thread that has started the process, which may come earlier.
    """
    os.set_inheritable(waiting, False)
    fcntl.fcntl(waiting, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(waiting, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(waiting, fcntl.F_SETFL, os.O_ASYNC)
    if poll_readable([waiting], 0):
        os._exit(1)
