"""Redirects the output of a rank into a file, from which it is sent to rank 0."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from isotrain.core.rendezvous.crash_output import (
    Dismiss,
    faulthandler_enabled,
    output_tail_on_crash,
)
from isotrain.core.system.standard_streams import line_buffered

_MAX_BYTES = 1 << 16


class OutputTail:
    """Reads a growing file of output, as `tail -f` does.

    Attributes:
        dismiss: Call it before this process ends on purpose: the tail is not shown then.
    """

    def __init__(self, descriptor: int, dismiss: Dismiss) -> None:
        self.dismiss = dismiss
        self._descriptor = descriptor
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str:
        """The next new text, at most 64 KiB; empty: there is none."""
        chunk = os.pread(self._descriptor, _MAX_BYTES, self._position)
        self._position += len(chunk)
        return self._decoder.decode(chunk)


@contextlib.contextmanager
def output_to_file() -> Iterator[OutputTail]:
    """Context in which file descriptors 1 and 2 go to a file, line by line, native output included.

    If this process dies, the tail of the file goes to the original standard error.
    """
    with tempfile.TemporaryFile() as log, line_buffered():
        _flush()
        originals = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        try:
            with (
                output_tail_on_crash(log.fileno(), originals[1]) as dismiss,
                faulthandler_enabled(),
            ):
                yield OutputTail(log.fileno(), dismiss)
        finally:
            _flush()
            for number, original in zip((1, 2), originals, strict=True):
                os.dup2(original, number)
                os.close(original)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
