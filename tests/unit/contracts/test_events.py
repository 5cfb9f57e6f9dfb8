"""What processes tell: every kind of event survives the pipe, and so does a reader of another version."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from isotrain.core.contracts import events
from isotrain.core.contracts.events import Event, ProcessEvent, read_event

_EVENTS: list[Event] = [
    events.Started(pid=12),
    events.Heartbeat(),
    events.Ready(),
    events.Ready(plan={"run": "digits", "samples": 300}),
    events.Progress(rank=3, done=8, total=20, epoch=0, loss=0.5, samples_per_s=None),
    events.Steps(step=7, first=6, losses=[0.5, 0.25], learning_rates=[0.1, 0.1]),
    events.Scalars(step=7, steps=[6, 7], values=[{"kl": math.inf}, {"kl": 0.5, "norm": 2.0}]),
    events.MediaLogged(logged_step=6, name="a", media="text", file="media/a/step-000000006.txt"),
    events.Evaluating(),
    events.EpochEnded(metrics={"accuracy": 0.75}, epoch=0, done=8, loss=0.25),
    events.CheckpointSaved(done=8, location="s3://bucket/step-000000008", best=True),
    events.Resumed(done=8, location="kept", changes=["steps: 8 then, 9 now"], lost=[]),
    events.Warned(text="look"),
    events.WorkerLost(lost_rank=2, lost_step=None, reason="it left", cause="was ended by SIGKILL"),
    events.Interrupted(
        generation=0, done=8, phase=1, state_bytes=8, metrics_bytes=4, reason="PeerLostError: gone"
    ),
    events.Waiting(state_bytes=8, data={"training": [56, 7]}),
    events.MembersChanged(
        time=1.5,
        generation=1,
        lost={"2": "was ended by SIGKILL"},
        joined=[4],
        done=8,
        members=[0, 1, 3, 4],
    ),
    events.Failed(
        time=1.5, error="ValueError", message="no", traceback="Traceback\n ...", is_peer_error=False
    ),
    events.Finished(call="close"),
    events.Output(text="NaN", rank=2),
    events.FilePart(name="weights.safetensors", begin=3, size=7, data="NaN="),
    events.LauncherNote(time=1.5, text="fresh processes"),
    events.Restarted(time=1.5, failure="rank 1", after_step=8, from_step=4, replicas=2),
    events.RunFailed(time=1.5, message="rank 1 raised"),
    events.CommandFailed(error="SpecError", message="no loss", exit_code=2),
]


def test_every_kind_of_event_is_tested() -> None:
    kinds = {*ProcessEvent.__subclasses__(), *Event.__subclasses__()} - {ProcessEvent}
    assert {type(event) for event in _EVENTS} == kinds


@pytest.mark.parametrize("event", _EVENTS, ids=lambda event: event.kind)
def test_an_event_survives_the_pipe(event: Event) -> None:
    line = event.to_line()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert read_event(line) == event


def test_nan_and_infinity_survive_the_pipe() -> None:
    losses = [math.inf, -math.inf, math.nan]
    line = events.Steps(first=0, losses=losses, learning_rates=[0.1] * 3).to_line()
    json.loads(line, parse_constant=pytest.fail)
    read = read_event(line)
    assert isinstance(read, events.Steps)
    assert list(read.losses[:2]) == losses[:2]
    assert math.isnan(read.losses[2])


def test_the_rank_comes_before_the_fields() -> None:
    fields = events.Started(rank=3, time=1.5, step=7, call="start", pid=12).to_dict()
    assert list(fields.items()) == [
        ("event", "started"),
        ("rank", 3),
        ("time", 1.5),
        ("step", 7),
        ("call", "start"),
        ("pid", 12),
    ]
    assert events.Output(text="hello").to_dict() == {"event": "output", "text": "hello", "rank": 0}


def test_unknown_fields_are_ignored() -> None:
    started = {**events.Started(pid=12).to_dict(), "mood": "good"}
    assert read_event(json.dumps(started).encode()) == events.Started(pid=12)
    assert read_event(json.dumps({**started, "event": "dreamt"}).encode()) is None


def test_the_reporter_says_who_when_and_where() -> None:
    program = (
        "from isotrain.core.contracts import events, reporter\n"
        "own = reporter.Reporter(3, descriptor=1)\n"
        "own.step = 7\n"
        "own.enter('evaluate')\n"
        "own.emit(events.Evaluating(rank=9))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    found = [event for line in told.splitlines() if (event := read_event(line))]
    (evaluating,) = (event for event in found if isinstance(event, events.Evaluating))
    assert (evaluating.rank, evaluating.step, evaluating.call) == (3, 7, "evaluate")
    assert evaluating.time > 1e9
