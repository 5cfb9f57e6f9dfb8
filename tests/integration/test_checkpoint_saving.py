"""When a run saves checkpoints, and that training goes on beside it."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.signals import heed_signals
from integration.resume_runs import STEPS, spec

import isotrain
from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.folder import CheckpointFolder, checkpoint_at
from isotrain.core.checkpoints.local_storage import LocalStorage
from isotrain.core.contracts.state import ALL_STATE
from isotrain.core.session.weights import weight_readers
from isotrain.testing.check_context import assert_same as assert_same_state

pytestmark = pytest.mark.usefixtures("reference")


def test_state_is_restored_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each portion is read after the one before is written."""
    read, found = Checkpoint.read, []

    def noting(*given: Any) -> Any:
        found.append(read(*given))
        return found[-1]

    with isotrain.open_session(spec(), backend="reference") as session:
        for batch in session.batches():
            session.step(batch)
        session.save(tmp_path)
        expected = session.read_state(ALL_STATE)
        monkeypatch.setattr(weight_readers, "PORTION_BYTES", 300)
        monkeypatch.setattr(Checkpoint, "read", noting)
        session.write_state({name: np.zeros_like(value) for name, value in expected.items()})
        session.restore(tmp_path)
        assert_same_state(session.read_state(ALL_STATE), expected, "state")
    sizes = [[value.nbytes for value in portion.values()] for portion in found]
    assert all(sum(portion) <= 300 for portion in sizes if len(portion) > 1)
    assert sum(len(portion) > 1 for portion in sizes) > 1


def no_room(session: isotrain.Session) -> list[float]:
    """The second checkpoint cannot be written."""
    losses = []
    for batch in session.batches():
        losses.append(float(session.step(batch)))
        if session.steps_done == 5:
            session.save()  # the first one is whole now
        if session.steps_done == 5 and session.is_main:
            folder = session.run_directory / "checkpoints"
            folder.rename(session.run_directory / "away")
            folder.write_text("no folder")
        session.save_if_due()
    return losses


def no_room_for_rank_1(session: isotrain.Session) -> Any:
    """Rank 0 gives up then, which nobody need be told."""

    def writing(self: LocalStorage, path: str) -> Any:
        raise OSError(errno.ENOSPC, "no folder", path)

    if session.rank:
        LocalStorage.writing = writing  # type: ignore[method-assign]
    losses = []
    for batch in session.batches():
        losses.append(float(session.step(batch)))
        session.save_if_due()
    return losses


@pytest.mark.parametrize(("work", "teller"), [(no_room, 0), (no_room_for_rank_1, 1)])
def test_training_goes_on_when_a_checkpoint_cannot_be_written(
    work: Any, teller: int, tmp_path: Path
) -> None:
    told: list[Any] = []
    losses, _ = isotrain.launch(
        work,
        spec(),
        backend="reference",
        replicas=2,
        output=tmp_path / "run",
        on_event=told.append,
    )
    assert len(losses) == STEPS
    warnings = [event for event in told if event["event"] == "warning"]
    about = [event for event in warnings if "checkpoint of step 6 was not saved" in event["text"]]
    assert [event["rank"] for event in about] == [teller]
    assert re.search("Not a directory|no folder", about[0]["text"])


def hanging(session: isotrain.Session) -> Any:
    """Rank 1 writes its share of the first checkpoint when the others were to be saved."""
    is_free, storage = threading.Event(), LocalStorage
    write = storage.writing

    def writing(self: LocalStorage, path: str) -> Any:
        is_free.wait()
        return write(self, path)

    session.plan.timeouts["silence"] = 0.1  # type: ignore[index]  # of this process alone
    if session.rank:
        storage.writing = writing  # type: ignore[method-assign]
    saved = []
    for batch in session.batches():
        session.step(batch)
        if session.steps_done == 4:
            is_free.set()
            session.save()
        saved.append(session.save_if_due())
    return saved


def test_training_goes_on_while_a_checkpoint_hangs(tmp_path: Path) -> None:
    told: list[Any] = []
    checkpoint = {"every_steps": 1, "keep_last": None}
    returned = isotrain.launch(
        hanging,
        spec(steps=5, checkpoint=checkpoint),
        backend="reference",
        replicas=2,
        output=tmp_path / "run",
        on_event=told.append,
    )
    assert returned == [[True, False, False, True, True]] * 2
    warnings = [event["text"] for event in told if event["event"] == "warning"]
    assert [text.partition(":")[0] for text in warnings] == [
        "the checkpoint of step 2 is left out",
        "the checkpoint of step 3 is left out",
    ]
    found = CheckpointFolder(tmp_path / "run/checkpoints").complete()
    assert [each.step for each in found] == [1, 4, 5]


def test_checkpoints_are_saved_every_so_many_seconds(tmp_path: Path) -> None:
    policy = {"every_minutes": 1e-4, "folder": str(tmp_path / "kept")}
    given = spec(checkpoint=policy, steps=10**6)
    with isotrain.open_session(given, backend="reference") as session:
        for batch in session.batches():
            session.step(batch)
            if session.save_if_due():
                break
        step = session.steps_done
        session.stop()
    assert step < 10**6
    assert checkpoint_at(tmp_path / "kept").step == step


def test_a_step_is_saved_again_when_it_turns_out_the_best(tmp_path: Path) -> None:
    given = spec(checkpoint={"every_steps": 1, "folder": str(tmp_path)})
    with isotrain.open_session(given, backend="reference") as session:
        session.notes["seen"] = [1]
        session.step(next(session.batches()))
        assert session.save_if_due()
        session.save_if_due(best=True)
        session.restore()
        assert session.best_step == 1
        session.notes["seen"].append(2)
        session.save_if_due()
        session.restore()
        assert session.notes["seen"] == [1, 2]
        (folder,) = tmp_path.iterdir()
        written = folder.stat().st_ino
        session.save_if_due()
        session.stop()
    assert folder.stat().st_ino == written


@pytest.fixture
def slowly_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints take a while until they are complete."""
    commit = CheckpointFolder.commit

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return commit(*args, **options)

    monkeypatch.setattr(CheckpointFolder, "commit", late)


@pytest.mark.usefixtures("slowly_completed")
def test_restore_waits_for_the_checkpoint_being_written(tmp_path: Path) -> None:
    policy = {"every_steps": 1, "folder": str(tmp_path)}
    with isotrain.open_session(spec(checkpoint=policy), backend="reference") as session:
        session.step(next(session.batches()))
        assert session.save_if_due()
        session.restore()
        assert session.steps_done == 1


@pytest.mark.usefixtures("slowly_completed")
def test_training_waits_for_foreground_checkpoints(
    tmp_path: Path,
) -> None:
    policy = {"every_steps": 1, "folder": str(tmp_path), "background": False}
    with isotrain.open_session(spec(checkpoint=policy), backend="reference") as session:
        session.step(next(session.batches()))
        assert session.save_if_due(overlap_next_step=True)
        assert checkpoint_at(tmp_path).step == 1
        session.stop()


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from integration.resume_runs import spec, Slow
import isotrain
if __name__ == "__main__":
    given = spec(steps=3000, transform=Slow(), plugins=["isotrain.testing.reference"])
    isotrain.run(given, backend="reference", replicas=2, output=sys.argv[1], resume="auto")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.failures)]
)
def test_signals_save_a_checkpoint_and_end_the_run(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    folder = tmp_path / "run"
    command = [sys.executable, script, folder]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
    ) as program:
        assert program.stderr is not None
        seen = [next(line for line in program.stderr if "checkpoint after" in line)]
        program.send_signal(signal.SIGUSR1)
        program.send_signal(number)
        seen += program.stderr.readlines()
        assert program.wait(60) == -number, seen
    assert sum(line.startswith("Traceback") for line in seen) == (number == signal.SIGINT)
    saved = (folder / "checkpoints").glob("step-*")
    last = max(int(each.name.removeprefix("step-")) for each in saved)
    steps = (folder / "steps.jsonl").read_text().splitlines()
    done = json.loads(steps[-1])
    assert last == done["first"] + len(done["losses"]), "the last checkpoint is of the last step"
