"""The report of a run: what its page says is what the files of the run directory have."""

from __future__ import annotations

import json
import re
import shutil
import threading
from pathlib import Path

import pytest
from helpers.html_page import Page
from helpers.in_process import command
from integration.session_specs import spec

import isotrain
from isotrain.analysis.run_report.html import follow, render, write_report
from isotrain.analysis.run_report.run_files import RunFiles
from isotrain.core.errors import IsotrainError
from isotrain.core.launching.run_directory.run_directory import RunDirectory

pytestmark = pytest.mark.usefixtures("reference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "net"
    isotrain.run(
        spec(name="net", metrics=["mean_absolute_error"]),
        backend="reference",
        replicas=2,
        output=folder,
        on_event=lambda event: None,
    )
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "net")
    return tmp_path / "net"


@pytest.mark.slow
def test_figures_are_those_of_the_result(copy: Path) -> None:
    path, is_running = write_report(copy)
    page = Page(path.read_text(encoding="utf-8"))
    result = json.loads((copy / "result.json").read_text())
    assert not is_running
    assert f"Finished: final loss {result['final_loss']:.6g}" in page.text
    names = {"final_loss": "final loss", "last_loss": "loss of the last step"}
    for name, label in names.items():
        assert f"{label}{result[name]:.6g}" in page.text
    for name, value in result["metrics"].items():
        assert f"{name.replace('_', ' ')}{value:.6g}" in page.text
    assert f"session, s{result['timings']['session_s']:.6g}" in page.text
    assert not page.of("script")
    assert "refresh" not in [meta.get("http-equiv") for meta in page.of("meta")]
    links = [str(link["href"]).removeprefix("#") for link in page.of("a")]
    assert set(links) <= {given.get("id") for _, given in page.elements}


def test_each_process_has_its_times_and_memory(folder: Path) -> None:
    run = RunFiles(folder)
    assert [process.rank for process in run.processes] == [0, 1]
    for process in run.processes:
        assert process.ready is not None
        assert process.ended is not None
        assert process.started <= process.ready <= process.ended
        assert (process.peak_memory_bytes or 0) > 2**20
    spans = [span for span in run.spans() if span.track == "rank 1"]
    assert [span.name for span in spans] == ["set up", "train"]


def test_metrics_are_by_steps_done(folder: Path) -> None:
    run = RunFiles(folder)
    series = run.metric_series()
    assert list(series["loss"]["training"]) == [3, 6, 9]
    assert series["loss"]["training"][9] == isotrain.read_result(folder).final_loss
    assert set(series) == {"loss", "mean_absolute_error"}


def test_the_page_of_a_failed_run_has_its_traceback(copy: Path) -> None:
    (copy / "result.json").unlink()
    failed = {"event": "failed", "rank": 1, "time": 1.0, "step": 2, "call": "step"}
    failed |= {"error": "ValueError", "message": "bad <data>", "is_peer_error": False}
    failed |= {"traceback": f'File "{copy}/x.py", line 3: bad <data>'}
    end = {"event": "run failed", "time": 2.0, "message": "rank 1 failed"}
    with (copy / "events.jsonl").open("a") as events:
        events.writelines(json.dumps(each) + "\n" for each in (failed, end))
    page = Page(render(RunFiles(copy)))
    assert "Failed: step 9 of 9" in page.text
    assert 'rank 1 failed File "x.py", line 3: bad <data>' in page.text


@pytest.mark.slow
def test_a_run_that_goes_on_is_followed_to_its_end(copy: Path) -> None:
    written = copy / "report.html"
    with RunDirectory(copy).locked():
        assert write_report(copy, follows=True) == (written, True)
        assert 'http-equiv="refresh"' in written.read_text(encoding="utf-8")
        follower = threading.Thread(target=follow, args=(copy,))
        follower.start()
    follower.join()
    assert 'http-equiv="refresh"' not in written.read_text(encoding="utf-8")


def test_the_command_writes_the_page_of_a_run(copy: Path) -> None:
    done = command("report", str(copy), "--json", folder=copy)
    assert json.loads(done.stdout)["report"] == str(copy / "report.html")
    assert (copy / "report.html").is_file()


def test_a_folder_without_results_is_told(tmp_path: Path) -> None:
    done = command("report", "nowhere", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    expected = "nowhere has no results. Expected the folder of a run, of a comparison"
    assert expected in done.stderr


def test_a_damaged_file_is_named(copy: Path) -> None:
    (copy / "steps.jsonl").write_text("{\n")
    with pytest.raises(IsotrainError, match=re.escape("steps.jsonl, line 1")):
        write_report(copy)


def _process_event(kind: str, rank: int, time: float, **fields: object) -> dict[str, object]:
    return {"event": kind, "rank": rank, "time": time, "step": None, "call": "", **fields}


def _started(time: float, *ranks: int) -> list[dict[str, object]]:
    return [_process_event("started", rank, time + rank, pid=1) for rank in ranks]


def test_a_resumed_run_has_the_processes_of_its_last_start(copy: Path) -> None:
    plan = json.loads((copy / "plan.json").read_text())
    warned = _process_event("warning", 0, 103.0, text="slow")
    ready = _process_event("ready", 0, 102.0, samples=9, plan=plan)
    events = [*_started(100.0, 0, 1), ready, warned, *_started(200.0, 2, 0, 1)]
    _write_events(copy, events)
    run = RunFiles(copy)
    assert [(process.rank, process.started) for process in run.processes] == [
        (0, 200.0),
        (1, 201.0),
        (2, 202.0),
    ]
    assert "3.0 s0warning" in Page(render(run)).text


def test_a_start_without_a_rank_of_an_earlier_one_is_a_start(copy: Path) -> None:
    failure = {"failure": "lost", "after_step": 0, "from_step": 0, "replicas": 3}
    restarted = {"event": "restarted", "time": 150.0, **failure}
    _write_events(copy, [*_started(100.0, 0, 1), restarted, *_started(200.0, 2)])
    run = RunFiles(copy)
    assert [process.rank for process in run.processes] == [2]
    assert "50.0 slauncherrestarted" in Page(render(run)).text


def test_the_traceback_is_of_the_last_start(copy: Path) -> None:
    (copy / "result.json").unlink()
    error = {"error": "ValueError", "message": "", "is_peer_error": False}
    first = _process_event("failed", 0, 102.0, traceback="of the first", **error)
    last = _process_event("failed", 0, 202.0, traceback="of the last", **error)
    end = {"event": "run failed", "time": 203.0, "message": "rank 0 failed"}
    _write_events(copy, [*_started(100.0, 0), first, *_started(200.0, 0), last, end])
    text = Page(render(RunFiles(copy))).text
    assert "rank 0 failed of the last" in text
    assert "rank 0 failed of the first" not in text


def _write_events(folder: Path, events: list[dict[str, object]]) -> None:
    lines = (json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text("".join(lines))
