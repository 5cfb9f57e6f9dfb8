"""Elastic runs that processes join while they train: in place of lost ones, or by `isotrain join`."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from helpers import waiting
from helpers.in_process import command
from helpers.waiting import wait_until
from integration import elastic_runs
from integration.elastic_runs import (
    REPLICAS,
    STEPS,
    Joins,
    Kills,
    WaitsForNewcomer,
    assert_same,
    changes_of,
    changes_told,
    die,
    process,
    require_whole_history,
    run,
    spec,
)

import isotrain
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.supervision import join_requests
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

pytestmark = pytest.mark.usefixtures("reference", "no_processes_left")

for module in (sys.modules[__name__], elastic_runs, waiting):
    cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> isotrain.RunResult:
    """A run from which nothing is lost."""
    result, _ = run(tmp_path_factory.mktemp("whole") / "run", elastic=None)
    return result


def test_a_lost_process_is_replaced(
    whole: isotrain.RunResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="isotrain.run")
    elastic = {"min": 1, "replacements": 1}
    waits = WaitsForNewcomer(6, tmp_path / "reached")
    changes = {"callbacks": [Kills(between={1: 2}), waits], "data": waits.data}
    result, events = run(tmp_path / "run", **changes, elastic=elastic)
    assert_same(result, whole)
    require_whole_history(events)
    assert changes_told(events) == [({"1"}, [], [0, 2, 3]), (set(), [4], [0, 2, 3, 4])]
    assert changes_of(events)[1]["done"] == 7
    _, joined = result.history.members
    assert joined == {"done": 7, "lost": {}, "joined": [4], "members": [0, 2, 3, 4]}
    assert (tmp_path / "run" / "rank-4.log").exists()
    levels = [level for _, level, text in caplog.record_tuples if " on after step " in text]
    assert levels == [logging.WARNING, logging.INFO]


SUCCESSIONS: Mapping[str, tuple[Kills, list[list[int]]]] = {
    "one after the other": (Kills(between={0: 1, 1: 4, 2: 8}), [[1, 2], [2, 3], [3, 4]]),
    "a newcomer": (Kills(between={1: 2, 2: 5}), [[0, 2], [0, 3]]),
    "in an evaluation": (Kills(evaluating={0: 4}), [[1, 2]]),
    "after the last step": (Kills(between={0: STEPS - 1}), [[1, 2]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SUCCESSIONS)
def test_a_run_that_needs_all_replicas_waits_for_new_ones(
    name: str, whole: isotrain.RunResult, tmp_path: Path
) -> None:
    kills, members = SUCCESSIONS[name]
    result, events = run(tmp_path / "run", 2, callbacks=[kills], elastic={"min": 2})
    assert_same(result, whole)
    require_whole_history(events)
    assert [list(change["members"]) for change in changes_of(events)] == members
    first, last = result.history.epochs[0], result.history.epochs[-1]
    for found, undisturbed in ((first, whole.history.epochs[0]), (last, whole.history.epochs[-1])):
        assert found["validation_loss"] == pytest.approx(undisturbed["validation_loss"], abs=1e-12)


class WaitsForFile:
    """Callback that waits before the last steps until a file is there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if batch.step == 10:
            wait_until(self.path.exists, 60)


def test_replicas_join_on_request_up_to_the_largest_number(
    whole: isotrain.RunResult, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    joins = Joins(folder, 2)
    waits = WaitsForNewcomer(6, tmp_path / "reached", 2)
    callbacks = [waits, WaitsForFile(folder / "asked")]
    fields = spec(callbacks=callbacks, data=waits.data, elastic={"min": 1, "max": 3})
    result = isotrain.run(fields, backend="reference", replicas=2, output=folder, on_event=joins)
    joins.finish()
    assert_same(result, whole)
    require_whole_history(joins.events)
    assert changes_told(joins.events) == [(set(), [2], [0, 1, 2])]
    first, second = joins.answers
    assert first == [{"starts": 2}, {"joined": 2, "done": 7, "replicas": 3}]
    (refused,) = second
    assert refused["refused"] == "it has 3 replicas, and may have 3 (elastic.max of its spec)"


def data_for_the_first() -> isotrain.DataSet:
    if process() >= REPLICAS:
        raise ValueError("no data for newcomers")
    return elastic_runs.data()


def joined_on_request(
    folder: Path, data: Callable[[], isotrain.DataSet], whole: isotrain.RunResult
) -> Joins:
    """A run that a further replica is asked to join, and that ends as one that it did not join."""
    joins = Joins(folder, 1)
    callbacks = [WaitsForFile(folder / "asked")]
    fields = spec(callbacks=callbacks, elastic={"min": 1, "max": 5}, data=data)
    result = isotrain.run(
        fields, backend="reference", replicas=REPLICAS, output=folder, on_event=joins
    )
    joins.finish()
    assert_same(result, whole)
    return joins


def test_a_newcomer_that_fails_does_not_end_the_run(
    whole: isotrain.RunResult, tmp_path: Path
) -> None:
    joins = joined_on_request(tmp_path / "run", data_for_the_first, whole)
    ((_, failed),) = joins.answers
    expected = (
        "rank 4, which was to join the run, raised ValueError: ValueError: no data for newcomers"
    )
    assert failed["failed"].startswith(expected)
    notes = [event["text"] for event in joins.events if event["event"] == "note"]
    assert notes == [f"{expected}: the run goes on without it"]


def wide_model() -> Network:
    return Network([Dense(4, 4096, "tanh", name="hidden"), Dense(4096, 2, name="head")])


def test_a_newcomer_says_how_large_the_state_is(tmp_path: Path) -> None:
    """With the average of the weights; the members know it once they have left the group."""
    folder = tmp_path / "run"
    joins = Joins(folder, 1)
    changes = {"model": {"numpy": wide_model}, "ema": 0.9, "elastic": {"min": 1, "max": 2}}
    waits = WaitsForNewcomer(6, tmp_path / "reached", 1)
    fields = spec(callbacks=[waits], data=waits.data, **changes)
    isotrain.run(fields, backend="reference", replicas=1, output=folder, on_event=joins)
    joins.finish()
    (told,) = [e["state_bytes"] for e in joins.events if e["event"] == "waiting"]
    (left,) = [e for e in joins.events if e["event"] == "interrupted"]
    assert told >= left["state_bytes"] + left["metrics_bytes"]


def other_data_for_newcomers() -> isotrain.DataSet:
    """As many samples, of which some differ."""
    data = elastic_runs.data()
    if process() >= REPLICAS:
        data.train[0][...] += 1.0
    return data


def test_a_newcomer_with_other_data_does_not_end_the_run(
    whole: isotrain.RunResult, tmp_path: Path
) -> None:
    joins = joined_on_request(tmp_path / "run", other_data_for_newcomers, whole)
    assert changes_told(joins.events) == []
    ((_, failed),) = joins.answers
    assert "has other training samples than the run, though as many" in failed["failed"]


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (
            data_for_the_first,
            "rank 5: before its first step, then ValueError: no data for newcomers",
        ),
        (other_data_for_newcomers, "rank 5: before its first step; it has other training samples"),
    ],
)
def test_newcomers_that_fail_end_a_run_that_needs_them(
    load: Callable[[], isotrain.DataSet], reason: str, tmp_path: Path
) -> None:
    kills = Kills(between={1: 2})
    elastic = {"min": REPLICAS, "replacements": 2}
    with pytest.raises(RunFailedError) as caught:
        run(tmp_path / "run", callbacks=[kills], elastic=elastic, data=load)
    text = str(caught.value)
    assert text.startswith("rank 1 of 6 was ended by SIGKILL")
    assert reason in text
    assert "no process came in its place" in text


def own_loop(session: isotrain.Session) -> list[Any]:
    for batch in session.batches():
        loss = float(session.step(batch))
        session.notes["losses"] = [*session.notes.get("losses", []), loss]
        if process() == 0 and batch.step == 4:
            die()
    return [process(), session.rank, session.replicas, session.notes["losses"]]


def test_an_own_loop_goes_on_with_a_newcomer(whole: isotrain.RunResult, tmp_path: Path) -> None:
    fields = spec(elastic={"min": 3})
    returned = isotrain.launch(own_loop, fields, backend="reference", replicas=3, output=tmp_path)
    assert [each[:3] for each in returned] == [[1, 0, 3], [2, 1, 3], [3, 2, 3]]
    for *_, losses in returned:
        assert losses == pytest.approx(whole.history.loss, abs=1e-12)


@pytest.mark.slow
def test_the_command_joins_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    told: list[Any] = []

    def ask() -> None:
        left_behind = folder / "join.json"  # by a start under SLURM that was killed
        left_behind.write_text('{"host": "127.0.0.9", "port": 1, "key": "00", "rank": 2}')
        arguments = [sys.executable, "-m", "isotrain", "join", str(folder)]
        told.append(subprocess.run(arguments, capture_output=True, text=True, check=False))
        left_behind.unlink()
        (folder / "asked").touch()

    asking = threading.Thread(target=ask)

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "steps" and not asking.ident:
            asking.start()

    waits = WaitsForNewcomer(6, tmp_path / "reached", 2)
    callbacks = [waits, WaitsForFile(folder / "asked")]
    fields = spec(callbacks=callbacks, data=waits.data, elastic={"min": 1, "max": 3})
    isotrain.run(fields, backend="reference", replicas=2, output=folder, on_event=on_event)
    asking.join()
    assert told[0].stdout == "rank 2 starts\nrank 2 has joined: 3 replicas go on after step 7\n"
    ended = command("join", str(folder), folder=tmp_path)
    assert ended.returncode
    assert "the run has ended. `isotrain resume` goes on with it" in ended.stderr


def test_the_command_says_that_the_run_ended_before_it_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    run(folder, 2)
    monkeypatch.setattr(join_requests, "request_join", lambda path: iter(()))
    ended = command("join", str(folder), folder=tmp_path)
    assert "the run has ended before a replica joined it." in ended.stderr


def test_nothing_joins_a_run_that_is_not_elastic(tmp_path: Path) -> None:
    folder, told = tmp_path / "run", []

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "epoch" and not told:
            told.append(command("join", str(folder), folder=tmp_path))

    fields = spec(elastic=None)
    isotrain.run(fields, backend="reference", replicas=2, output=folder, on_event=on_event)
    assert told[0].returncode
    assert "the run is not elastic, so that no replica can join it" in told[0].stderr
