"""Sends a value to processes of this program: pickle protocol 5, with large buffers in one mapped file."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import cloudpickle

from isotrain.core.errors import IsotrainError
from isotrain.core.system.interpreter_start import FILE_MODULE

_LARGE_BYTES = 1 << 20
_ALIGNMENT = 64
_MAX_DEPTH = 8  # of the name of what cannot be pickled: objects may refer to each other


class _FileModules(MetaPathFinder):
    """Imports modules that another process has loaded from files by their paths.

    Attributes:
        paths: Path of each module's file.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = paths

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The file of a module; None for others."""
        file = self.paths.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def _file_modules() -> dict[str, str]:
    """Paths of the modules that this process has loaded from files by their paths, or could load."""
    paths: dict[str, str] = {}
    for finder in sys.meta_path:
        paths |= finder.paths if isinstance(finder, _FileModules) else {}
    for name, module in [*sys.modules.items()]:
        if name.startswith(FILE_MODULE):
            paths[name] = str(module.__file__)
    return paths


class Payload:
    """An object, pickled once for several processes.

    Arrays of at least 1 MiB are written to an unnamed file, which every process maps copy-on-write: they are
    in memory once, however many processes there are. The rest is pickled, and goes through a pipe.

    Attributes:
        descriptor: File descriptor of the file with the large arrays.
        stream: Bytes for each process.
    """

    def __init__(
        self,
        value: Any,
        folder: Path | None,
        receivers: str = "the processes of the run",
        advice: str = "inside the function",
    ) -> None:
        """Pickles a value.

        Args:
            value: Any value that cloudpickle can pickle.
            folder: Folder for the file with the large arrays; None: it is in memory.
            receivers: The processes, for an error.
            advice: Where to create what cannot be pickled, for an error.

        Raises:
            IsotrainError: Part of the value cannot be pickled.
            OSError: The arrays cannot be written.
        """
        self._file: IO[bytes] = (
            os.fdopen(os.memfd_create("isotrain-pickle"), "w+b")
            if folder is None
            else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - close() closes it
        )
        try:
            spans: list[tuple[int, int]] = []
            pickled = _pickled(
                value, lambda buffer: self._keep_in_stream(buffer, spans), receivers, advice
            )
            self._file.flush()
        except BaseException:
            self.close()
            raise
        self.descriptor = self._file.fileno()
        preamble = json.dumps({"spans": spans, "files": _file_modules()})
        self.stream = preamble.encode() + b"\n" + pickled

    def append_stream(self) -> int:
        """Appends the stream to the file, for processes without a pipe; returns where it begins."""
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(self.stream)
        self._file.flush()
        return start

    def _keep_in_stream(self, buffer: pickle.PickleBuffer, spans: list[tuple[int, int]]) -> bool:
        """Buffer callback of pickle: writes a large buffer to the file; True keeps a small one in-band."""
        with buffer.raw() as raw:
            if raw.nbytes < _LARGE_BYTES:
                return True
            start = self._file.seek(-self._file.tell() % _ALIGNMENT, os.SEEK_CUR)
            self._file.write(raw)
            spans.append((start, raw.nbytes))
            return False

    def close(self) -> None:
        """Closes the file; processes that have mapped it keep it."""
        self._file.close()


def _pickled(value: Any, buffer_callback: Any, receivers: str, advice: str) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=buffer_callback)
    except OSError:
        raise
    except Exception as error:  # an object's pickling may raise anything
        raise IsotrainError(
            f"{_unpicklable_part(value)} cannot be sent to {receivers}: {type(error).__name__}: {error}."
            f" Create what cannot be pickled (open files, locks, connections, generators) {advice}, so that"
            " every process creates its own."
        ) from error
    return pickled


def _unpicklable_part(value: Any, path: str = "") -> str:
    """Dotted name of the innermost field that cannot be pickled."""
    for name, part in _parts(value).items() if path.count(".") < _MAX_DEPTH else ():
        try:
            cloudpickle.dumps(part, protocol=5, buffer_callback=lambda buffer: False)
        except Exception:
            return _unpicklable_part(part, f"{path}.{name}" if path else name)
    return path or type(value).__name__


def _parts(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    return {} if isinstance(value, type | ModuleType) else getattr(value, "__dict__", {})


def receive(stream: IO[bytes], descriptor: int) -> Any:
    """Unpickles the value of a `Payload` in a process that receives it.

    Args:
        stream: The payload's `stream`.
        descriptor: Inherited duplicate of the payload's `descriptor`.
    """
    preamble = json.loads(stream.readline())
    sys.meta_path.append(_FileModules(preamble["files"]))
    spans = preamble["spans"]
    if not spans:
        return pickle.load(stream)  # noqa: S301 - from the parent, over a pipe
    pages = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    buffers = [pages[start : start + size] for start, size in spans]
    return pickle.load(stream, buffers=buffers)  # noqa: S301 - as above
