"""What run directories and logs tell: lists of runs, and output as it comes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.waiting import wait_until

from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import main
from isotrain.core.contracts.events import (
    EpochEnded,
    Event,
    Finished,
    Output,
    Ready,
    RunFailed,
    Scalars,
    Started,
    Steps,
)
from isotrain.core.errors import PlanError
from isotrain.core.launching.run_directory import run_listing
from isotrain.core.launching.run_directory.run_directory import (
    RunDirectory,
    last_weights_file,
    locate_run,
    rank_log,
)
from isotrain.core.launching.run_directory.run_listing import runs_in, summarize_run
from isotrain.core.reporting import tables
from isotrain.core.run.controller import shown_ranks

PLAN = {
    "run": "digits",
    "backend": "torch-ddp",
    "collective": "gloo",
    "strategy": "data-parallel",
    "launcher": "local",
    "replicas": 2,
    "total_steps": None,
}


def directory(path: Path, *events: Event, plan: dict[str, Any] = PLAN) -> RunDirectory:
    """The directory of a run that has told these events."""
    made = RunDirectory.create("digits", path)
    made.write("spec.json", {})
    made.write("plan.json", plan)
    for event in events:
        made.append_event(event)
    return made


def steps(first: int, *losses: float) -> Steps:
    return Steps(first=first, losses=losses, learning_rates=[0.1] * len(losses))


def test_a_run_shows_its_step(tmp_path: Path) -> None:
    told = (
        Started(pid=1, time=100.0),
        Ready(plan={"total_steps": 8}, time=101.0),
        steps(0, 3.0, 2.0),
        steps(2, 1.5),
    )
    run = directory(tmp_path / "run", *told)
    with run.locked():
        found = summarize_run(run.path)
        assert (found.state, found.done, found.total_steps, found.loss) == ("running", 3, 8, 1.5)
        assert (found.started, found.why) == (100.0, None)
    assert summarize_run(run.path).state == "stopped"
    run.append_event(RunFailed(time=102.0, message="rank 1 died\nits traceback"))
    failed = summarize_run(run.path)
    assert (failed.state, failed.why) == ("failed", "rank 1 died")
    run.append_event(Finished(time=103.0))
    assert summarize_run(run.path).state == "finished"


def test_a_run_with_a_result_is_finished(tmp_path: Path) -> None:
    run = directory(tmp_path / "run")
    run.write("result.json", {})
    found = summarize_run(run.path)
    assert (found.state, found.done, found.loss, found.started) == ("finished", 0, None, None)


def test_a_half_written_line_is_ignored(tmp_path: Path) -> None:
    run = directory(tmp_path / "run", steps(0, 3.0, 2.0))
    with (run.path / "steps.jsonl").open("a") as stream:
        stream.write('{"event": "steps", "first": 2, "los')
    assert (summarize_run(run.path).done, summarize_run(run.path).loss) == (2, 2.0)


@pytest.mark.parametrize("scalars", [0, 1, 30])
def test_the_last_line_of_a_long_file_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scalars: int
) -> None:
    """Scalars of the same steps may follow: the norms of gradients, for example."""
    monkeypatch.setattr(run_listing, "CHUNK_BYTES", 7)
    blocks = [steps(first, float(first), first + 0.5) for first in range(0, 40, 2)]
    others = [Scalars(steps=[39], values=[{"gradient_norm": 2.0}])] * scalars
    run = directory(tmp_path / "run", *blocks, *others)
    assert (summarize_run(run.path).done, summarize_run(run.path).loss) == (40, 38.5)


def test_a_file_of_scalars_alone_has_no_step(tmp_path: Path) -> None:
    run = directory(tmp_path / "run", Scalars(steps=[0], values=[{"gradient_norm": 2.0}]))
    assert (summarize_run(run.path).done, summarize_run(run.path).loss) == (0, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.json", "{"),
        ("events.jsonl", "what\n"),
        ("steps.jsonl", "{}\n"),
        ("steps.jsonl", '{"event": "finished"}\n'),
    ],
)
def test_a_damaged_run_hides_no_other(tmp_path: Path, name: str, text: str) -> None:
    directory(tmp_path / "sound", Started(pid=1, time=5.0))
    directory(tmp_path / "torn")
    (tmp_path / "torn" / name).write_text(text)
    (tmp_path / "no run").mkdir()
    sound, torn = runs_in(tmp_path)
    assert (sound.directory.name, sound.state) == ("sound", "stopped")
    assert (torn.directory.name, torn.state) == ("torn", "damaged")
    assert torn.why


def test_runs_are_listed_as_they_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == ExitCode.USAGE
    assert "there is no folder runs" in capsys.readouterr().err
    directory(Path("runs/b"), Started(pid=1, time=100.0), steps(0, 2.0))
    directory(
        Path("runs/a"), Started(pid=1, time=200.0), RunFailed(time=201.0, message="it broke\nthere")
    )
    assert main(["runs", "--json"]) == ExitCode.OK
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert (first["directory"], first["step"], first["loss"]) == ("runs/b", 1, 2.0)
    assert (first["backend"], first["launcher"], first["replicas"]) == ("torch-ddp", "local", 2)
    assert (second["state"], second["why"]) == ("failed", "it broke")
    assert main(["runs"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "| b   | stopped | 1    | 2         | " in text
    assert "on        torch-ddp@2" in text, "what is the same for all is said once"
    assert "  a  it broke" in text
    assert main(["runs", "runs/a"]) == ExitCode.OK
    assert "| b " not in capsys.readouterr().out
    for name in ("runs/b", "b", "last"):
        run = locate_run(name)
        assert Path(run).resolve() == (
            tmp_path / "runs/a" if name == "last" else tmp_path / "runs/b"
        )
    assert locate_run("nothing") == "nothing"
    monkeypatch.setenv("ISOTRAIN_RUNS", str(tmp_path / "elsewhere"))
    assert main(["logs", "last"]) == ExitCode.USAGE
    assert "last: there are no runs in" in capsys.readouterr().err
    assert RunDirectory.create("named", None).path.parent == tmp_path / "elsewhere"


def test_what_is_copied_is_never_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    rows = [("digits-20261126-143452", "some words that fold"), ("b", "few")]
    for columns, expected in (
        (80, "some words that fold"),
        (40, "some words"),
        (24, "  what  some"),
    ):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = tables.table(("run", "what"), rows)
        assert "digits-20261126-143452" in text
        assert expected in text
        assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())) <= columns


def test_listing_runs_prevents_no_start(tmp_path: Path) -> None:
    run = directory(tmp_path / "run")
    with run.locked(), pytest.raises(PlanError, match="a run is still running in"), run.locked():
        pass
    assert not run.is_locked()
    with run.locked():
        assert run.is_locked()


def test_a_log_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = directory(tmp_path / "run")
    rank_log(run.path, 0).write_text("zero\n")
    rank_log(run.path, 3).write_text("three\nunfinished")
    assert main(["logs", str(run.path), "--rank", "3", "--follow"]) == ExitCode.OK
    assert capsys.readouterr().out == "three\nunfinished\n"
    assert main(["logs", str(run.path), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {"event": "output", "rank": 0, "text": "zero\n"}
    assert main(["logs", str(run.path), "--rank", "1"]) == ExitCode.USAGE
    assert "has no output of this rank. Available: 0, 3." in capsys.readouterr().err
    assert main(["logs", str(tmp_path)]) == ExitCode.USAGE
    assert "is no run directory" in capsys.readouterr().err


def test_chosen_ranks_are_shown_as_they_print(tmp_path: Path) -> None:
    rank_log(tmp_path, 2).write_text("of an earlier run\n")
    seen: list[Event] = []
    with shown_ranks(tmp_path, [2, 3], seen.append) as show:
        show(Output(text="of rank 0\n"))
        show(EpochEnded(epoch=0, done=1, loss=None, metrics={}))
        with rank_log(tmp_path, 2).open("a") as log:
            log.write("now\nand unfin")
        wait_until(lambda: len(seen) == 2, 60)
        with rank_log(tmp_path, 2).open("a") as log:
            log.write("ished\nlast")
        wait_until(lambda: len(seen) == 3, 60)
        rank_log(tmp_path, 3).write_text("at the end\n")
    told = [each for each in seen if isinstance(each, Output)]
    assert [(each.rank, each.text) for each in told[:2]] == [(2, "now\n"), (2, "and unfinished\n")]
    assert sorted((each.rank, each.text) for each in told[2:]) == [
        (2, "last\n"),
        (3, "at the end\n"),
    ]


def test_rank_0_alone_is_shown_unless_others_are_chosen(tmp_path: Path) -> None:
    seen: list[Event] = []
    with shown_ranks(tmp_path, [0], seen.append) as show:
        show(Output(text="of rank 0\n"))
    assert seen == [Output(text="of rank 0\n", rank=0)]


def line(kind: type[Event], **fields: Any) -> str:
    """What no run writes, of an event that there is."""
    return json.dumps({"event": kind.kind, **fields}) + "\n"


WRONG: dict[str, Any] = {
    "backend": {"plan.json": json.dumps({**PLAN, "backend": 5})},
    "replicas": {"plan.json": json.dumps({**PLAN, "replicas": "two"})},
    "steps": {"plan.json": json.dumps({**PLAN, "total_steps": [1]})},
    "plan": {"plan.json": "[]"},
    "nested": {"plan.json": "[" * 100_000},
    "digits": {"plan.json": "1" * 5000},
    "event": {"events.jsonl": "[1]\n"},
    "time": {"events.jsonl": line(Started, pid=1, rank=0, time="noon")},
    "year": {"events.jsonl": line(Started, pid=1, rank=0, time=1e300)},
    "measured": {"events.jsonl": line(Ready, rank=0, time=1.0, plan=[3])},
    "message": {"events.jsonl": line(RunFailed, time=1.0, message=4)},
    "losses": {"steps.jsonl": line(Steps, first=0, losses=[{}], learning_rates=[1])},
    "first": {"steps.jsonl": line(Steps, first="a", losses=[1], learning_rates=[1])},
}


def test_other_files_do_not_break_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory(tmp_path / "sound", Started(pid=1, time=100.0))
    for name, files in WRONG.items():
        made = directory(tmp_path / name)
        for file, text in files.items():
            (made.path / file).write_text(text, encoding="utf-8")
    found = {run.directory.name: run for run in runs_in(tmp_path)}
    assert found.pop("sound").state == "stopped"
    assert {name: run.state for name, run in found.items()} == dict.fromkeys(WRONG, "damaged")
    assert all(run.why for run in found.values())
    assert main(["runs", str(tmp_path)]) == 0
    assert "damaged" in capsys.readouterr().out


def test_files_with_unusual_names_are_ignored(tmp_path: Path) -> None:
    run = directory(tmp_path / "run")
    for name in ("rank-x.log", "weights-after-many-steps.safetensors"):
        (run.path / name).touch()
    assert last_weights_file(run.path) is None
    assert main(["logs", str(run.path)]) == ExitCode.USAGE


PRINTED = "\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J\t10 %\r20 %\r\nend\x08\n"
SHOWN = "{}red{} \\x1b]0;title\\x07\\x1b[2J\t10 %\n20 %\nend\\x08\n"


def test_control_characters_of_a_log_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = directory(tmp_path / "run")
    rank_log(run.path, 0).write_bytes(PRINTED.encode())
    assert main(["logs", str(run.path)]) == 0
    assert capsys.readouterr().out == SHOWN.format("", "")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["logs", str(run.path)]) == 0
    assert capsys.readouterr().out == SHOWN.format("\x1b[31m", "\x1b[0m")
