"""Whoever writes, reads and removes checkpoints in one folder at once: none is put together from several."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from unit.checkpoints.recording_os import WatchedOs
from unit.checkpoints.saving import newest, save

from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.errors import CheckpointError


@pytest.mark.usefixtures("watched")
def test_two_runs_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    """One is ahead, so that each removes what the other writes."""
    save(tmp_path, 1, 0, "start")
    done, refused, wrong = threading.Event(), [], []

    def run(value: int) -> None:
        for step in range(2, 30):
            try:
                save(tmp_path, step, value, f"{value}-{step}")
            except CheckpointError as error:
                refused.append(str(error))
            except BaseException as error:
                wrong.append(error)

    def read() -> None:
        while not done.is_set():
            try:
                newest(tmp_path)
            except CheckpointError as error:
                refused.append(str(error))
            except BaseException as error:
                wrong.append(error)

    writers = [threading.Thread(target=run, args=(value,)) for value in (1, 2)]
    reader = threading.Thread(target=read)
    for thread in (*writers, reader):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert wrong == []
    assert all(str(tmp_path) in each for each in refused)
    assert newest(tmp_path)[0] == 29


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_checkpoint_removed_during_its_commit_does_not_exist(
    tmp_path: Path, watched: WatchedOs, made_anew: bool
) -> None:
    save(tmp_path, 3, 3, "ahead")

    def prune(name: str, *args: Any) -> None:
        if name == "replace" and str(args[1]).endswith("step-000000002/manifest.json"):
            watched.before = lambda *_: None
            CheckpointFolder(tmp_path).prune(keep_last=1)
            if made_anew:  # by a writer that knows of nothing
                Path(args[1]).parent.mkdir()
                Path(args[0]).write_bytes(b"")

    watched.before = prune
    with pytest.raises(CheckpointError, match="step-000000002"):
        save(tmp_path, 2, 2, "behind")
    assert newest(tmp_path) == (3, 3)
    assert [each.step for each in CheckpointFolder(tmp_path).complete()] == [3]


def test_a_file_removed_during_reading_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1, 1, "t")
    checkpoint = CheckpointFolder(tmp_path).newest()
    assert checkpoint is not None
    assert checkpoint.sections()
    save(tmp_path, 2, 2, "t")
    with pytest.raises(CheckpointError, match=r"step-000000001/t/state-00000\.safetensors"):
        checkpoint.read("state")


def test_incomplete_attempts_are_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(tmp_path, 1, 1, "good")
    for step in (0, 1, 2):
        folder.write(step, token="killed", writer=0, sections={})
    folder.save(2, sections={}, run={})
    assert folder.prune(keep_last=5) == [0]
    assert [each.name for each in (tmp_path / "step-000000001").iterdir() if each.is_dir()] == [
        "good"
    ]
    assert (
        len(list((tmp_path / "step-000000002").iterdir())) == 3
    )  # somebody may be writing it anew
