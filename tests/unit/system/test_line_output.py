"""Lines of standard streams go out whole, whatever was set before."""

from __future__ import annotations

import io
import sys

import pytest

from isotrain.core.system.standard_streams import line_buffered


class Pieces(io.BytesIO):
    """What was written, as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, part: bytes) -> int:  # type: ignore[override]
        self.written.append(bytes(part))
        return len(part)


@pytest.mark.parametrize("at_once", [True, False], ids=["unbuffered", "buffered"])
def test_a_line_is_written_at_its_end_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    pieces = Pieces()
    stream = io.TextIOWrapper(pieces, write_through=at_once)
    monkeypatch.setattr(sys, "stdout", stream)
    with line_buffered():
        print("rank", 0)
        assert pieces.written == [b"rank 0\n"]
        print("rank", 1, end="")
        assert pieces.written == [b"rank 0\n"]
        print()
        assert pieces.written == [b"rank 0\n", b"rank 1\n"]
    assert (stream.line_buffering, stream.write_through) == (False, at_once)
