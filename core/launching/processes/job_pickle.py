"""How a job travels to the processes of its run: pickled over a pipe, large arrays in shared memory pages."""

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
    """An object, packed once for all processes of a run.

    Arrays of a mebibyte and more are written to a nameless file next to the run's own, which every
    process maps: they are in memory once, however many processes there are, and are copied page by
    page where a process writes to them. The rest is pickled, and goes through a pipe.

    Attributes:
        descriptor: Of the file with the large arrays.
        stream: What to write to a process's standard input.
    """

    def __init__(self, value: Any, folder: Path) -> None:
        """Packs `value`.

        Raises:
            IsotrainError: Part of it cannot be pickled.
            OSError: The arrays cannot be written to `folder`.
        """
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - close() closes it
        try:
            spans: list[tuple[int, int]] = []
            pickled = _pickled(value, lambda buffer: self._keep(buffer, spans))
            self._file.flush()
        except BaseException:
            self.close()
            raise
        self.descriptor = self._file.fileno()
        self.stream = json.dumps(spans).encode() + b"\n" + pickled

    def _keep(self, buffer: pickle.PickleBuffer, spans: list[tuple[int, int]]) -> bool:
        """Writes a large buffer to the file; tells pickle whether to keep it in the stream."""
        with buffer.raw() as raw:
            if raw.nbytes < _LARGE_BYTES:
                return True
            start = self._file.seek(-self._file.tell() % _ALIGNMENT, os.SEEK_CUR)
            self._file.write(raw)
            spans.append((start, raw.nbytes))
            return False

    def close(self) -> None:
        """Gives the file up; processes that have mapped it keep it."""
        self._file.close()


def _pickled(value: Any, keep: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=keep)
    except OSError:
        raise
    except Exception as error:  # an object may raise anything when it is asked to be pickled
        raise IsotrainError(
            f"{_unpicklable_part(value)} cannot be sent to the processes of the run:"
            f" {type(error).__name__}: {error}. Make what cannot travel (open files, locks,"
            " connections, generators) inside the function, so that every process makes its own."
        ) from error
    return pickled


def _unpicklable_part(value: Any, path: str = "") -> str:
    """Names the innermost field that cannot be pickled."""
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
    """Unpacks what a `Payload` packed.

    Args:
        stream: What its `stream` was written to.
        descriptor: Its `descriptor`, inherited.
    """
    spans = json.loads(stream.readline())
    if not spans:
        return pickle.load(stream)  # noqa: S301 - from the parent, over a pipe
    pages = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    buffers = [pages[start : start + size] for start, size in spans]
    return pickle.load(stream, buffers=buffers)  # noqa: S301 - as above
