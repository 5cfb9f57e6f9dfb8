"""A reader sees a file as it was before, or whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.core.system.files import atomic_file, atomic_write, rewrite_lines


def test_a_file_is_replaced_when_all_of_it_is_there(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    atomic_write(target, "before")
    with atomic_file(target) as stream:
        stream.write(b"af")
        stream.flush()
        assert target.read_text() == "before"
        stream.write(b"ter")
    assert target.read_text() == "after"
    assert list(tmp_path.iterdir()) == [target]


def test_what_fails_half_way_changes_nothing(tmp_path: Path) -> None:
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


def test_lines_are_kept_changed_and_left_out_and_a_cut_one_is_forgotten(tmp_path: Path) -> None:
    target = tmp_path / "lines"
    target.write_bytes(b"keep\ndrop\nchange\r\ncut off")
    stands = {b"keep\n": b"keep\n", b"drop\n": None, b"change\r\n": b"changed\n"}
    rewrite_lines(target, stands.__getitem__)
    assert target.read_bytes() == b"keep\nchanged\n"


def test_lines_are_as_they_were_where_one_cannot_be_read(tmp_path: Path) -> None:
    target = tmp_path / "lines"
    target.write_bytes(b"1\nx\n")
    with pytest.raises(ValueError, match="x"):
        rewrite_lines(target, lambda line: b"%d\n" % int(line))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"1\nx\n"]
