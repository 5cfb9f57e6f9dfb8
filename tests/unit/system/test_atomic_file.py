"""A reader sees a file as it was before, or whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.core.system.files import atomic_file, atomic_write, rewrite_lines


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    atomic_write(target, "before")
    with atomic_file(target) as stream:
        stream.write(b"af")
        stream.flush()
        assert target.read_text() == "before"
        stream.write(b"ter")
    assert target.read_text() == "after"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    atomic_write(target, "before")

    def fail() -> None:
        with atomic_file(target) as stream:
            stream.write(b"af")
            raise KeyError("no more")

    with pytest.raises(KeyError):
        fail()
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_lines_are_kept_changed_or_dropped_and_a_truncated_one_is_dropped(tmp_path: Path) -> None:
    target = tmp_path / "lines"
    target.write_bytes(b"keep\ndrop\nchange\r\ncut off")
    stands = {b"keep\n": b"keep\n", b"drop\n": None, b"change\r\n": b"changed\n"}
    rewrite_lines(target, stands.__getitem__)
    assert target.read_bytes() == b"keep\nchanged\n"


def test_an_unreadable_line_leaves_the_file_unchanged(tmp_path: Path) -> None:
    target = tmp_path / "lines"
    target.write_bytes(b"1\nx\n")
    with pytest.raises(ValueError, match="x"):
        rewrite_lines(target, lambda line: b"%d\n" % int(line))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"1\nx\n"]
