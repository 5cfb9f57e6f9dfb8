"""The program of a template: imports a framework, runs nothing of it, and is forked."""

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
from isotrain.core.system.interpreter import is_of_interpreter, take_over
from isotrain.core.system.process import exit_code_from

_OWN_IMPORTS = (
    "isotrain.core.worker.worker",
    "isotrain.core.worker.entry_points",
    "isotrain.core.session.session",
    "isotrain.core.contracts.job",
    "isotrain.core.launching.processes.job_pickle",
    "isotrain.core.launching.run_directory.return_values",
    "isotrain.core.plugins.resolved_spec",
)
"""What every process of a run needs of isotrain, whatever its backend."""
_STREAMS = 3
_GIVEN = 7
"""Descriptors of a request to fork: streams, what is inherited, and the working directory."""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LAUNCHER = "launcher"
_DOOR = "door"


def main(door: int, launcher: int, imports: Sequence[str]) -> None:
    """Imports, then forks for as long as the launcher lives.

    Args:
        door: Descriptor of the socket to the launcher.
        launcher: The launcher's number.
        imports: What the adapter declares.
    """
    _die_with(launcher)  # an import may hold the interpreter for long, and notice nothing
    gc.disable()  # of what is made here, nothing goes
    before = dict(os.environ)
    for module in (*imports, *_OWN_IMPORTS, *BUILTINS):
        importlib.import_module(module)
    gc.freeze()  # a collection in a child would otherwise write to every page that it shares
    set_by_imports = dict(os.environ.items() - before.items())
    _Template(socket.socket(fileno=door), launcher, set_by_imports).serve()
    os._exit(0)  # a framework that was never run need not be torn down


class _Template:
    """Forks processes for one launcher, and tells it when they have ended."""

    def __init__(
        self, door: socket.socket, launcher: int, set_by_imports: Mapping[str, str]
    ) -> None:
        self._door = door
        self._set_by_imports = set_by_imports
        self._pid = os.getpid()
        self._said = os.pread(sys.stderr.fileno(), os.fstat(sys.stderr.fileno()).st_size, 0)
        self._files = _changeable_files()
        os.chdir("/")  # it must keep no folder from being removed or unmounted
        self._children: dict[int, int] = {}
        """Number to descriptor of those whose end was not told yet."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ, _DOOR)
        self._launcher = os.pidfd_open(launcher)
        self._selector.register(self._launcher, selectors.EVENT_READ, _LAUNCHER)
        _outlive_parent_thread()  # from now on it sees the launcher's end

    def serve(self) -> None:
        """Does what it is asked to, until the launcher is gone; its children go with it."""
        protocol.send(self._door, {"ready": True})
        while True:
            for key, _ in self._selector.select():
                if key.data == _LAUNCHER or (key.data == _DOOR and not self._answer()):
                    return
                if key.data in self._children:
                    self._tell_end(key.data)

    def _answer(self) -> bool:
        """Answers one request; False where there will be none any more."""
        received = protocol.receive(self._door)
        if received is None:
            return False
        request, descriptors = received
        if "fork" in request:
            protocol.send(self._door, self._attempt(request["fork"], descriptors))
        elif "release" in request:
            self._unwatch(request["release"])
            os.waitpid(request["release"], 0)
            protocol.send(self._door, {"released": request["release"]})
        else:
            changed = [name for name, stamp in self._files.items() if _stamp(name) != stamp]
            protocol.send(self._door, {"changed": changed})
        return True

    def _unwatch(self, pid: int) -> None:
        descriptor = self._children.pop(pid, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _tell_end(self, pid: int) -> None:
        """Tells how a child ended; it stays a zombie, so that nobody else gets its number."""
        self._unwatch(pid)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        protocol.send(self._door, {"ended": pid, "code": exit_code_from(ended)})

    def _attempt(self, variables: Mapping[str, str], descriptors: Sequence[int]) -> dict[str, Any]:
        """Forks, or says why the system did not let it: its other children live on."""
        try:
            if len(descriptors) < _GIVEN:  # the system drops those that there is no room for
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return {"forked": self._fork(variables, descriptors)}
        except OSError as error:
            return {"refused": str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, variables: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Forks a child, and waits until it leads a session of its own."""
        waiting, ready = os.pipe()
        try:
            pid = _forked()
            if pid == 0:
                self._become(variables, descriptors, (waiting, ready))
        finally:
            os.close(ready)
            with open(waiting, "rb", buffering=0) as reading:
                reading.read(1)  # the end of it, also where there is no child
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

    def _become(
        self, variables: Mapping[str, str], descriptors: Sequence[int], pipe: Sequence[int]
    ) -> NoReturn:
        """Makes this child a process like one that has started by itself, and does its work."""
        try:
            os.setsid()
            _die_with(self._pid)
            self._close_own()
            for descriptor in pipe:
                os.close(descriptor)
            *inherited, folder = descriptors[_STREAMS:]
            _take_over(descriptors[:_STREAMS], {**variables, **self._set_by_imports}, folder)
            os.write(sys.stderr.fileno(), self._said)
            gc.enable()
            take_over(json.loads(sys.stdin.buffer.readline()))
            importlib.invalidate_caches()
            importlib.import_module("isotrain.core.worker.worker").main(*inherited)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)  # `main` ends the process

    def _close_own(self) -> None:
        """Closes what belongs to the template, and to other children of it."""
        watched = [key.fd for key in self._selector.get_map().values()]
        self._selector.close()
        for descriptor in watched:
            os.close(descriptor)
        self._door.detach()


def _forked() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: adapters vouch for them
        return os.fork()


def _die_with(parent: int) -> None:
    """Has the system end this process when its parent does."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _outlive_parent_thread() -> None:
    """Undoes `_die_with`, by which also the end of the thread that started this process would end it."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, 0)


def _take_over(streams: Sequence[int], variables: Mapping[str, str], folder: int) -> None:
    """Takes streams, variables and working directory from the request; draws other random numbers."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.fchdir(folder)
    os.close(folder)
    _show(os.fsencode(variables.get(VARIABLE, "")))
    os.environ.clear()
    os.environ.update(variables)
    if "numpy" in sys.modules:  # Python's own generator is seeded anew by `fork`
        sys.modules["numpy"].random.seed()


def _show(place: bytes) -> None:
    """Has the system show this process's place in its run as a variable, as of a fresh process.

    By that whatever it forks is found, though it may leave its session. The system shows the memory
    that held the variables a process was started with; the template was given room there.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    room = os.environ[VARIABLE]
    ctypes.memmove(getenv(VARIABLE.encode()), place, min(len(place), len(room)))


def _changeable_files() -> dict[str, Any]:
    """The imported files that lie in no environment, and may change while this process lives."""
    found = map(_file_of, list(sys.modules.values()))
    return {
        name: _stamp(name)
        for name in map(os.path.abspath, filter(None, found))
        if not is_of_interpreter(name)
    }


def _file_of(module: Any) -> str | None:
    """Where it comes from; a module that waits to be used is not asked, for that would execute it."""
    if isinstance(module, ModuleType):
        file: str | None = object.__getattribute__(module, "__dict__").get("__file__")
        return file
    return getattr(module, "__file__", None)


def _stamp(name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
