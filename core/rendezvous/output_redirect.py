"""What a process of a joined run prints: into a file, of which rank 0 is sent what is new."""

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

_MOST_BYTES = 1 << 16


class OutputTail:
    """Reads what is written to a file, as it grows.

    Attributes:
        dismiss: Has nobody show the end of it when this process ends.
    """

    def __init__(self, descriptor: int, dismiss: Dismiss) -> None:
        self.dismiss = dismiss
        self._descriptor = descriptor
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str:
        """What is new, or the first part of it."""
        chunk = os.pread(self._descriptor, _MOST_BYTES, self._position)
        self._position += len(chunk)
        return self._decoder.decode(chunk)


@contextlib.contextmanager
def output_to_file() -> Iterator[OutputTail]:
    """Within it, standard output and error go to a file, line by line, whoever writes to them.

    Should this process die, the end of it goes where its errors went before.
    """
    with tempfile.TemporaryFile() as log, line_buffered():
        _flush()
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        try:
            with output_tail_on_crash(log.fileno(), kept[1]) as dismiss, faulthandler_enabled():
                yield OutputTail(log.fileno(), dismiss)
        finally:
            _flush()
            for number, own in zip((1, 2), kept, strict=True):
                os.dup2(own, number)
                os.close(own)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
