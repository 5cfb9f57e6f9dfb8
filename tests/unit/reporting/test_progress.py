"""How a run is shown: the words, the plain lines, and the bar in a real pseudo terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from isotrain.core.contracts.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    MembersChanged,
    Output,
    Progress,
    Ready,
    Started,
    Warned,
    WorkerLost,
)
from isotrain.core.contracts.plan import Plan, StartMethod
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.reporting import progress as display
from isotrain.core.reporting import status, tables


def plan(replicas: int = 2) -> Plan:
    return Plan(
        run="digits",
        backend="some-backend",
        framework="torch",
        collective="ring" if replicas > 1 else "none",
        strategy="data-parallel",
        strategy_options={},
        launcher="local",
        device="cpu",
        replicas=replicas,
        threads=1,
        processes=tuple(ProcessInfo(r, "127.0.0.1", r, (r,)) for r in range(replicas)),
        start_method=StartMethod(),
        environment_variables={},
        precision="float32",
        global_batch_size=8,
        local_batch_sizes=(8 // replicas,) * replicas,
        gradient_accumulation_steps=1,
        scaling="none (x 1)",
        optimizer="sgd",
        learning_rate=0.1,
        timeouts={},
        options={},
    )


DIRECTORY = Path("runs/digits-in-a-folder-longer-than-a-narrow-terminal")


def ready(rank: int = 0) -> Event:
    measured = {"total_steps": 20, "steps_per_epoch": 10} if rank == 0 else None
    return Ready(rank=rank, plan=measured)


def progress(done: int) -> Event:
    epoch = (done - 1) // 10
    return Progress(done=done, total=20, epoch=epoch, loss=0.5, samples_per_s=1234.5)


def epoch(number: int) -> Event:
    metrics = {"accuracy": 0.75, "validation_loss": 0.6, "validation_accuracy": 0.7}
    return EpochEnded(epoch=number, done=10 * (number + 1), loss=0.25, metrics=metrics)


def whole_run() -> list[Event]:
    starts = [Started(rank=rank, pid=1) for rank in (0, 1)]
    steps = [progress(1), progress(9), epoch(0), progress(11), epoch(1)]
    return [
        *starts,
        Output(text="from ra"),
        Output(text="nk 0\n"),
        ready(0),
        ready(1),
        *steps,
    ]


def test_the_display_shows_the_phases() -> None:
    story = display.RunProgress(plan())
    phases = [story.phase]
    for each in whole_run():
        story.note(each)
        if story.phase != phases[-1]:
            phases.append(story.phase)
    assert phases == [
        "starting 2 processes",
        "building the model",
        "first step",
        "epoch 1/2",
        "epoch 2/2",
    ]
    assert (story.done, story.total) == (20, 20)


def test_the_display_waits_for_the_last_process() -> None:
    story = display.RunProgress(plan())
    story.note(Started(rank=1, pid=1))
    assert story.phase == "starting 2 processes"


@pytest.mark.parametrize(
    ("cause", "told"), [("was ended by SIGKILL", "was ended by SIGKILL"), (None, "left")]
)
def test_a_lost_worker_stays_on_the_screen(cause: str | None, told: str) -> None:
    lost = WorkerLost(lost_rank=2, lost_step=7, reason="left", cause=cause)
    assert display.RunProgress(plan()).note(lost) == f"worker lost: rank 2 {told}"


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with display.plain(plan(), DIRECTORY, stream) as show:
        for each in whole_run():
            show(each)
    assert stream.getvalue().splitlines() == [
        "digits on some-backend:ring, 2 replicas",
        f"run directory: {DIRECTORY}",
        "starting 2 processes",
        "building the model",
        "20 steps, 2 epochs",
        "first step",
        "epoch 1/2: loss 0.2500, accuracy 0.7500; validation: loss 0.6000, accuracy 0.7000",
        "epoch 2/2: loss 0.2500, accuracy 0.7500; validation: loss 0.6000, accuracy 0.7000",
    ]
    assert capsys.readouterr().out == "from rank 0\n"


def test_many_epochs_have_few_lines() -> None:
    story = display.RunProgress(plan())
    story.note(Ready(rank=0, plan={"total_steps": 305, "steps_per_epoch": 1}))
    shown = [number for number in range(305) if story.note(epoch(number))]
    assert shown[0] == 0
    assert shown[-1] == 304
    assert len(shown) <= 22
    assert (story.done, story.phase) == (3050, "epoch 305/305"), "the bar is at the last one"


def test_many_checkpoints_have_few_lines() -> None:
    story = display.RunProgress(plan())
    story.note(Ready(rank=0, plan={"total_steps": 3000, "steps_per_epoch": 10}))
    saved = [
        CheckpointSaved(rank=0, done=done, location=f"step-{done}", best=False)
        for done in range(10, 3001, 10)
    ]
    shown = [line for line in map(story.note, saved) if line]
    assert shown[0] == "checkpoint after step 10: step-10"
    assert len(shown) == 20


def test_each_of_many_epochs_has_a_line_if_asked() -> None:
    story = display.RunProgress(plan(), every_epoch=True)
    story.note(Ready(rank=0, plan={"total_steps": 305, "steps_per_epoch": 1}))
    assert all(story.note(epoch(number)) for number in range(305))


@pytest.mark.parametrize("quiet", [False, True])
def test_a_call_says_what_it_waits_for_in_a_notebook_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # other tests import it
    with status.waiting("predicting", quiet=quiet):
        status.default_progress(quiet)("half of it")
    assert not capsys.readouterr().err, "neither a terminal nor a notebook"
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    with status.waiting("predicting", quiet=quiet):
        status.default_progress(quiet)("half of it")
    assert capsys.readouterr().err == ("" if quiet else "predicting ...\nhalf of it\n")


def test_json_lines_are_strict_json() -> None:
    stream = io.StringIO()
    with display.json_lines(stream) as show:
        show({"loss": float("nan"), "best": [float("inf"), -float("inf"), 1.5]})
    line = json.loads(stream.getvalue(), parse_constant=pytest.fail)
    assert line["loss"] == "NaN"
    assert line["best"] == ["Infinity", "-Infinity", 1.5]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.25, "0.2500"),
        (12.5, "12.500"),
        (125.0, "125.00"),
        (1250.0, "1250.0"),
        (0.00012, "1.2e-04"),
        (-250000.0, "-2.5e+05"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_keep_their_width(value: float, text: str) -> None:
    assert display.short(value) == text


def in_terminal(columns: int) -> str:
    """What the bar writes to a terminal of so many columns, escape sequences removed."""
    program = f"""
        import sys, importlib.util
        spec = importlib.util.spec_from_file_location("parts", {__file__!r})
        parts = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(parts)
        with parts.display.bar(parts.plan(), parts.DIRECTORY) as show:
            for event in parts.whole_run():
                show(event)
        """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "LINES": "30"},
    )
    os.close(theirs)
    written = b""
    while chunk := _read(ours):
        written += chunk
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end of the terminal was closed
        return b""


@pytest.mark.parametrize("columns", [40, 60, 80, 140])
def test_progress_bar(columns: int) -> None:
    written = in_terminal(columns)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", written)]
    lines.remove(f"run directory  {DIRECTORY}")  # never broken: it is to be copied
    assert max(map(len, lines)) <= columns
    assert "digits on some-backend:ring, 2 replicas" in lines
    assert "from rank 0" in lines
    above = [line for line in lines if line.startswith("epoch 1/2  loss 0.2500")]
    assert len(above) == 1
    if columns >= 60:
        validation = "validation: loss 0.6000, accuracy 0.7000"
        assert (validation in map(str.strip, lines)) == (columns < 110)
    last = [line for line in lines if "20/20" in line][-1]
    assert last.startswith("epoch 2/2")
    if columns >= 60:
        assert "loss 0.2500" in last
        assert "1,23" in last
    assert ("accuracy 0.7500" in last) == (columns >= 110)


def test_a_warning_of_all_ranks_is_shown_once() -> None:
    story = display.RunProgress(plan())
    shown = [
        story.note(Warned(rank=rank, text=text)) for text in ("odd", "even") for rank in (0, 1)
    ]
    assert shown == ["warning: odd", None, "warning: even", None]


def test_facts_are_folded_but_not_within_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    sentence = "four words of it in one line, others below"
    text = tables.facts(None, [("run directory", str(DIRECTORY)), ("why", sentence)])
    first, *rest = text.splitlines()
    assert first == f"run directory  {DIRECTORY}"
    assert rest == ["why            four words of it in one", "               line, others below"]


def test_a_process_group_without_another_member_says_that_nobody_is_lost() -> None:
    event = MembersChanged(time=1.0, generation=2, lost={}, done=5, members=(0, 1))
    told = display.RunProgress(plan()).note(event)
    assert told == "the process group was formed anew: 2 replicas go on after step 5"
