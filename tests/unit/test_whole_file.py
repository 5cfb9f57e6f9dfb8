"""A reader sees a file as it was before, or whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.core.system.whole_file import whole_file, write_whole


def test_a_file_is_replaced_when_all_of_it_is_there(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    write_whole(target, "before")
    with whole_file(target) as stream:
        stream.write(b"af")
        stream.flush()
        assert target.read_text() == "before"
        stream.write(b"ter")
    assert target.read_text() == "after"
    assert list(tmp_path.iterdir()) == [target]


def test_what_fails_half_way_changes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    write_whole(target, "before")

    def fail() -> None:
        with whole_file(target) as stream:
            stream.write(b"af")
            raise KeyError("no more")

    with pytest.raises(KeyError):
        fail()
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]
