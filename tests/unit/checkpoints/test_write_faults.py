"""Whatever fails or stops while checkpoints are written and removed, the last good one is there and whole."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.checkpoints import killed_writers
from unit.checkpoints.recording_os import Disk, WatchedOs
from unit.checkpoints.saving import newest, save

from isotrain.core.errors import CheckpointError

FIRST = (1, 1, "first")
LATER, SAME_STEP = (2, 2, "second"), (1, 2, "second")


FAILURES = (pytest.mark.slow, pytest.mark.failures)


class Failing:
    """Fails the call with this number, and all later ones too if it lasts."""

    def __init__(self, place: int, code: int, lasts: bool) -> None:
        self.calls = 0
        self._place, self._code, self._lasts = place, code, lasts

    def __call__(self, *_: Any) -> None:
        number, self.calls = self.calls, self.calls + 1
        if number == self._place or (self._lasts and number > self._place):
            raise OSError(self._code, os.strerror(self._code))


@pytest.mark.parametrize(
    ("second", "code", "lasts"),
    [
        (LATER, errno.ENOSPC, False),
        (SAME_STEP, errno.EACCES, True),
        pytest.param(LATER, errno.EROFS, True, marks=FAILURES),
        pytest.param(SAME_STEP, errno.EIO, False, marks=FAILURES),
    ],
    ids=str,
)
def test_a_failed_system_call_loses_no_checkpoint(
    tmp_path: Path, watched: WatchedOs, second: tuple[int, int, str], code: int, lasts: bool
) -> None:
    save(tmp_path / "before", *FIRST)
    failures, failing = [], Failing(0, code, lasts)
    for place in itertools.count():
        location = tmp_path / "run" / str(place)
        shutil.copytree(tmp_path / "before", location)
        watched.before = failing = Failing(place, code, lasts)
        try:
            save(location, *second)
        except CheckpointError as error:
            failures.append(str(error))
            assert os.strerror(code) in failures[-1]
            assert str(location) in failures[-1]
        watched.before = lambda *_: None
        assert newest(location) in (FIRST[:2], second[:2])
        save(location, 3, 3, "third")
        assert newest(location) == (3, 3)
        assert [each.name for each in location.iterdir()] == ["step-000000003"]
        if failing.calls <= place:
            break
    assert len(failures) > 40


@pytest.mark.slow
@pytest.mark.failures
@pytest.mark.usefixtures("watched")
def test_a_kill_at_any_system_call_loses_no_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, killed_writers.__file__, str(tmp_path)]
    subprocess.run(command, check=True, timeout=100)
    assert newest(tmp_path / "whole") == (2, 2)
    killed = [each for each in tmp_path.iterdir() if each.name.isdecimal()]
    assert {newest(location) for location in killed} == {(1, 1), (2, 2)}
    assert len(killed) > 60
    for location in killed:
        save(location, 2, 3, "third")
        assert newest(location) == (2, 3)
        assert [each.name for each in location.iterdir()] == ["step-000000002"]


@pytest.mark.parametrize(
    ("second", "removals_are_done"),
    [
        (LATER, True),
        (SAME_STEP, False),
        pytest.param(LATER, False, marks=FAILURES),
        pytest.param(SAME_STEP, True, marks=FAILURES),
    ],
    ids=str,
)
def test_a_power_loss_at_any_system_call_loses_no_checkpoint(
    tmp_path: Path, watched: WatchedOs, second: tuple[int, int, str], removals_are_done: bool
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk, found = Disk(root), []
    watched.after = disk.saw
    save(root / "run", *FIRST)

    def look(done: Any, *call: Any) -> None:
        disk.saw(done, *call)
        if call[0] in ("open", "write", "close", "mkdir"):
            return  # nothing that outlasts a stop
        watched.after = lambda *_: None
        restored = disk.after_a_stop(tmp_path / "restored", removals_are_done)
        found.append(newest(restored / "run"))
        watched.after = look

    watched.after = look
    save(root / "run", *second)
    assert found == sorted(found)
    assert {*found} == {FIRST[:2], second[:2]}
    assert found.count(FIRST[:2]) > 20
