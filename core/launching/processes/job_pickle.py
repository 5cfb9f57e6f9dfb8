"""Sends a job to the rank processes: pickle protocol 5 over a pipe, with large buffers in one mapped file."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import cloudpickle

from isotrain.core.errors import IsotrainError

_LARGE_BYTES = 1 << 20
_ALIGNMENT = 64


class Payload:
    """An object, pickled once for all processes of a run.

    Arrays of at least 1 MiB are written to an unnamed file in the run directory, which every process maps
    copy-on-write: they are in memory once, however many processes there are. The rest is pickled, and goes
    through a pipe.

    Attributes:
        descriptor: File descriptor of the file with the large arrays.
        stream: Bytes for the standard input of each process.
    """

    def __init__(self, value: Any, folder: Path) -> None:
        """Pickles a value.

        Args:
            value: Any value that cloudpickle can pickle.
            folder: Folder for the file with the large arrays.

        Raises:
            IsotrainError: Part of the value cannot be pickled.
            OSError: The arrays cannot be written to `folder`.
        """
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - close() closes it
        try:
            spans: list[tuple[int, int]] = []
            pickled = _pickled(value, lambda buffer: self._keep_in_stream(buffer, spans))
            self._file.flush()
        except BaseException:
            self.close()
            raise
        self.descriptor = self._file.fileno()
        self.stream = json.dumps(spans).encode() + b"\n" + pickled

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


def _pickled(value: Any, buffer_callback: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=buffer_callback)
    except OSError:
        raise
    except Exception as error:  # an object's pickling may raise anything
        raise IsotrainError(
            f"{_unpicklable_part(value)} cannot be sent to the processes of the run:"
            f" {type(error).__name__}: {error}. Create what cannot be pickled (open files, locks,"
            " connections, generators) inside the function, so that every process creates its own."
        ) from error
    return pickled


def _unpicklable_part(value: Any, path: str = "") -> str:
    """Dotted name of the innermost field that cannot be pickled."""
    for name, part in _parts(value).items():
        try:
            cloudpickle.dumps(part, protocol=5, buffer_callback=lambda buffer: False)
        except Exception:
            return _unpicklable_part(part, f"{path}.{name}" if path else name)
    return path or type(value).__name__


def _parts(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    if type(value).__module__.startswith("isotrain."):
        return getattr(value, "__dict__", {})
    return {}


def receive(stream: IO[bytes], descriptor: int) -> Any:
    """Unpickles the value of a `Payload` in a rank process.

    Args:
        stream: Pipe to which the payload's `stream` is written.
        descriptor: Inherited duplicate of the payload's `descriptor`.
    """
    spans = json.loads(stream.readline())
    if not spans:
        return pickle.load(stream)  # noqa: S301 - from the parent, over a pipe
    pages = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    buffers = [pages[start : start + size] for start, size in spans]
    return pickle.load(stream, buffers=buffers)  # noqa: S301 - as above
