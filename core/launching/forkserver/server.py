"""Main program of a fork server, as `forkserver` of multiprocessing: imports, and forks rank processes."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from isotrain.core.contracts.process import VARIABLE
from isotrain.core.launching.forkserver import protocol
from isotrain.core.plugins.manager import BUILTINS
from isotrain.core.system.interpreter_start import apply_startup, is_in_prefix
from isotrain.core.system.process import exit_code_from

_WORKER_IMPORTS = (
    "isotrain.core.worker.worker",
    "isotrain.core.worker.entry_points",
    "isotrain.core.session.session",
    "isotrain.core.contracts.job",
    "isotrain.core.system.pickling",
    "isotrain.core.launching.run_directory.return_values",
    "isotrain.core.plugins.resolved_spec",
)
"""Modules of isotrain that every rank process needs, whatever its backend."""
_STREAMS = 3
_FORK_DESCRIPTORS = 7
"""Number of descriptors of a fork request: three streams, three inherited ones, the working directory."""
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
_LAUNCHER = "launcher"
_SOCKET = "socket"


def main(descriptor: int, launcher: int, imports: Sequence[str]) -> None:
    """Imports, then forks for as long as the launcher lives.

    Args:
        descriptor: Descriptor of the socket to the launcher.
        launcher: Process id of the launcher.
        imports: Modules that the adapter declares in its `StartMethod`.
    """
    _set_parent_death_signal(
        launcher
    )  # an import may hold the interpreter for long, and could not notice its end
    gc.disable()  # imported objects live as long as the process
    environment_before = dict(os.environ)
    for module in (*imports, *_WORKER_IMPORTS, *BUILTINS):
        importlib.import_module(module)
    gc.freeze()  # otherwise a collection in a child would write to every page that it shares
    set_by_imports = dict(os.environ.items() - environment_before.items())
    _Server(socket.socket(fileno=descriptor), launcher, set_by_imports).serve()
    os._exit(0)  # a framework that was never run need not be torn down


class _Server:
    """Forks processes for one launcher, and reports their exit codes."""

    def __init__(
        self, connection: socket.socket, launcher: int, set_by_imports: Mapping[str, str]
    ) -> None:
        """Watches the launcher and its socket.

        Args:
            connection: Unix socket to the launcher.
            launcher: Process id of the launcher.
            set_by_imports: Environment variables that the imports have set.
        """
        self._socket = connection
        self._set_by_imports = set_by_imports
        self._pid = os.getpid()
        self._import_output = os.pread(
            sys.stderr.fileno(), os.fstat(sys.stderr.fileno()).st_size, 0
        )
        self._files = _user_files()
        os.chdir("/")  # it must not keep a folder from being removed or unmounted
        self._children: dict[int, int] = {}
        """Process descriptors (pidfds) by process id, of children whose exit is not reported yet."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, _SOCKET)
        self._launcher = os.pidfd_open(launcher)
        self._selector.register(self._launcher, selectors.EVENT_READ, _LAUNCHER)
        _clear_parent_death_signal()  # from now on the pidfd shows the launcher's end

    def serve(self) -> None:
        """Answers requests until the launcher is gone; the children are killed with this process."""
        self._send({"ready": True})
        while True:
            for key, _ in self._selector.select():
                if key.data == _LAUNCHER or (key.data == _SOCKET and not self._answer()):
                    return
                if key.data in self._children:
                    self._report_exit(key.data)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(protocol.encode(message))

    def _answer(self) -> bool:
        """Answers one request; False if the launcher has closed the socket."""
        received = protocol.receive(self._socket)
        if received is None:
            return False
        request, descriptors = received
        if "fork" in request:
            self._send(self._try_fork(request["fork"], descriptors))
        elif "release" in request:
            self._unwatch(request["release"])
            os.waitpid(request["release"], 0)
            self._send({"released": request["release"]})
        else:
            changed = [name for name, stamp in self._files.items() if _stamp(name) != stamp]
            self._send({"changed": changed})
        return True

    def _unwatch(self, pid: int) -> None:
        descriptor = self._children.pop(pid, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _report_exit(self, pid: int) -> None:
        """Reports the exit code of a child, which stays a zombie so that its process id is not reused."""
        self._unwatch(pid)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        self._send({"ended": pid, "code": exit_code_from(ended)})

    def _try_fork(self, variables: Mapping[str, str], descriptors: Sequence[int]) -> dict[str, Any]:
        """Forks; if the system refuses, replies with the reason, and the other children live on."""
        try:
            if len(descriptors) < _FORK_DESCRIPTORS:  # the kernel drops those above RLIMIT_NOFILE
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return {"forked": self._fork(variables, descriptors)}
        except OSError as error:
            return {"refused": str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, variables: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Forks a child, waits until it leads its own session, and returns its process id."""
        ready_reader, ready_writer = os.pipe()
        try:
            pid = _fork_process()
            if pid == 0:
                self._run_child(variables, descriptors, (ready_reader, ready_writer))
        finally:
            os.close(ready_writer)
            with open(ready_reader, "rb", buffering=0) as reading:
                reading.read(1)  # end of file, also if there is no child
        self._watch(pid)
        return pid

    def _watch(self, pid: int) -> None:
        try:
            self._children[pid] = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._selector.register(self._children[pid], selectors.EVENT_READ, pid)

    def _run_child(
        self, variables: Mapping[str, str], descriptors: Sequence[int], pipe: Sequence[int]
    ) -> NoReturn:
        """Turns this forked child into what a fresh process would be, and runs the worker's `main`."""
        try:
            os.setsid()
            _set_parent_death_signal(self._pid)
            self._close_server_descriptors()
            for descriptor in pipe:
                os.close(descriptor)
            *inherited, folder = descriptors[_STREAMS:]
            _apply_request(descriptors[:_STREAMS], {**variables, **self._set_by_imports}, folder)
            os.write(sys.stderr.fileno(), self._import_output)
            gc.enable()
            apply_startup(json.loads(sys.stdin.buffer.readline()))
            importlib.invalidate_caches()
            importlib.import_module("isotrain.core.worker.worker").main(*inherited)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)  # `main` ends the process

    def _close_server_descriptors(self) -> None:
        """Closes the descriptors of the fork server and of its other children."""
        watched = [key.fd for key in self._selector.get_map().values()]
        self._selector.close()
        for descriptor in watched:
            os.close(descriptor)
        self._socket.detach()


def _fork_process() -> int:
    with warnings.catch_warnings():
        # Python warns of forking with threads; adapters vouch that those of their imports do not matter
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _set_parent_death_signal(parent: int) -> None:
    """Has the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _clear_parent_death_signal() -> None:
    """Clears the signal: the kernel sends it also when only the thread that started this process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def _apply_request(streams: Sequence[int], variables: Mapping[str, str], folder: int) -> None:
    """Sets standard streams, environment and working directory, and seeds NumPy's generator anew."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.fchdir(folder)
    os.close(folder)
    _expose_context(os.fsencode(variables.get(VARIABLE, "")))
    os.environ.clear()
    os.environ.update(variables)
    if "numpy" in sys.modules:  # Python's own generator is seeded anew by `fork`
        sys.modules["numpy"].random.seed()


def _expose_context(context: bytes) -> None:
    """Writes the process context into `/proc/<pid>/environ`, where a fresh process has it.

    `process_tree` finds by it whatever this process forks, even outside of its session. The kernel shows the
    memory that held the environment at the start; the fork server was started with padding there.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    padding = os.environ[VARIABLE]
    ctypes.memmove(getenv(VARIABLE.encode()), context, min(len(context), len(padding)))


def _user_files() -> dict[str, Any]:
    """Stamps of the imported files outside the interpreter's prefix: you may edit these at any time."""
    files = map(_file_of, list(sys.modules.values()))
    return {
        name: _stamp(name)
        for name in map(os.path.abspath, filter(None, files))
        if not is_in_prefix(name)
    }


def _file_of(module: Any) -> str | None:
    """`__file__` of a module, read without executing a lazily loaded one; None if it has none."""
    if isinstance(module, ModuleType):
        file: str | None = object.__getattribute__(module, "__dict__").get("__file__")
        return file
    return getattr(module, "__file__", None)


def _stamp(name: str) -> tuple[int, int] | None:
    """The mtime in ns and the size in bytes of a file; None if it is gone."""
    try:
        stat = os.stat(name)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
