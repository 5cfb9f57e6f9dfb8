"""Events, result, errors and end of a run that a launcher's program starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.waiting import wait_until
from integration import scheduler_job
from integration.scheduler_launchers import SPEC, Far, WrapperLauncher

import isotrain
from isotrain.analysis.compare import text
from isotrain.analysis.compare.measurement import runner
from isotrain.analysis.compare.measurement.measure import Measurement
from isotrain.analysis.compare.measurement.runner import Runner
from isotrain.analysis.pages import page
from isotrain.analysis.parity.trace import Trace
from isotrain.core.cli.internal_work import parse_internal_work
from isotrain.core.contracts.events import CommandFailed, Ready
from isotrain.core.contracts.launcher import LauncherChoice
from isotrain.core.launching.scheduler import scheduler_process
from isotrain.core.launching.scheduler.scheduler_run import WORK
from isotrain.core.spec.weight_name_map import MappedTensor, NameMap
from isotrain.plugin import RankCommand, Submission

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reference", "wrapper")]

HEEDFUL = """
import pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.alarm(120)
pathlib.Path(sys.argv[1], "waits").touch()
signal.sigwait([signal.SIGTERM])
pathlib.Path(sys.argv[1], "asked").touch()
"""
"""A command that ends when it is asked to; by itself after what any test takes."""
DEAF = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "waits").touch()
time.sleep(120)
"""
"""One that does not."""
KILLED = """
import os, signal, subprocess, sys, time
from isotrain.core.launching.processes.orphan_guard import OrphanGuard
program, folder, seconds = sys.argv[1:]
command = [sys.executable, "-I", "-S", "-c", program, folder]
wrapper = subprocess.Popen(command, start_new_session=True)
guard = OrphanGuard(float(seconds), [["touch", folder + "/last"]])
guard.watch(wrapper.pid)
while not os.path.exists(folder + "/waits"):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A process that starts such a command, and is killed."""


def run(folder: Path, launcher: str = "wrapper", **changes: Any) -> isotrain.RunResult:
    events = changes.pop("events", [])
    return isotrain.run(
        {**SPEC, **changes},
        backend="reference",
        replicas=1,
        launcher=launcher,
        output=folder / launcher,
        on_event=events.append,
    )


def test_the_result_and_the_files_are_those_of_a_local_run(tmp_path: Path) -> None:
    events: list[Any] = []
    driven = run(tmp_path, events=events, checkpoint={"every_steps": 4})
    local = run(tmp_path, "local", checkpoint={"every_steps": 4})
    assert driven.history.loss == local.history.loss
    for name, weights in local.weights.items():
        np.testing.assert_array_equal(driven.weights[name], weights)
    left = [{file.name for file in (tmp_path / each).iterdir()} for each in ("local", "wrapper")]
    assert left[1] - left[0] == {"launcher"}
    assert left[0] - left[1] == set()
    assert {"started", "ready", "steps", "finished"} <= {event["event"] for event in events}
    given = tmp_path / "wrapper" / "launcher"
    assert (given / "seen.txt").read_text().startswith("isotrain-driven-run-")
    assert (given / "seen.txt").stat().st_mode & 0o077 == 0


def test_files_come_from_hosts_that_share_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks wait until the output of one of them has arrived."""
    gate, there = tmp_path / "gate", tmp_path / "there"
    monkeypatch.setenv(scheduler_job.GATE, str(gate))
    monkeypatch.setattr(Far, "folder", str(there))
    shown: list[Any] = []

    def on_event(event: Any) -> None:
        if event["event"] == "output":
            shown.append(event)
            if event["rank"] == 1:
                gate.touch()

    driven = isotrain.run(
        {**SPEC, "data": "integration.scheduler_job:data_behind_a_gate"},
        backend="reference",
        launcher="far",
        output=tmp_path / "far",
        ranks=[1],
        on_event=on_event,
    )
    local = run(tmp_path, "local")
    assert driven.history.loss == pytest.approx(local.history.loss, rel=1e-12)
    for name, weights in local.weights.items():
        np.testing.assert_allclose(driven.weights[name], weights, rtol=1e-12)
    left = {file.name for file in (tmp_path / "far").iterdir()}
    assert left - {file.name for file in (tmp_path / "local").iterdir()} == {
        "launcher",
        "rank-1.log",
    }
    assert {event["rank"] for event in shown} == {1}
    assert (tmp_path / "far" / "rank-1.log").read_text().count("rank 1 waits\n") == 1
    assert "rank 1 waits" not in (tmp_path / "far" / "rank-0.log").read_text()
    assert [*there.glob("*/weights.safetensors")]


def test_an_error_of_a_rank_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(isotrain.NotANumberError, match="step 0"):
        run(tmp_path, data="integration.scheduler_job:data_not_finite")


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(isotrain.RunFailedError, match=r"rank 0 .*SIGKILL"):
        run(tmp_path, data="integration.scheduler_job:data_of_a_killed_process")


def test_a_run_is_restarted_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(scheduler_job.KilledOnce.MARK, str(tmp_path / "mark"))
    local = run(tmp_path, "local")
    spec = {
        **SPEC,
        "data": "integration.scheduler_job:KilledOnce",
        "checkpoint": {"every_steps": 2},
    }
    events: list[Any] = []
    driven = isotrain.run(
        spec,
        backend="reference",
        replicas=1,
        launcher="wrapper",
        max_restarts=1,
        output=tmp_path / "wrapper",
        on_event=events.append,
    )
    assert (tmp_path / "mark").exists()
    assert driven.history.loss == local.history.loss
    (restarted,) = (event for event in events if event["event"] == "restarted")
    assert restarted["from_step"] in (2, 4)


def test_a_launcher_program_that_ends_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WrapperLauncher, "program", ("ls",))
    with pytest.raises(
        isotrain.RunFailedError, match=r"wrapper ended with exit code 2(.|\n)*unrecognized option"
    ):
        run(tmp_path)


def test_a_launcher_program_that_never_ends_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = "rank 1 on far is lost"
    told = CommandFailed(error="RunFailedError", message=lost, exit_code=1).to_dict()
    text = (
        "import sys, time; mark = sys.argv[sys.argv.index('--line-prefix') + 1];"
        f" print('[0]<stdout>:' + mark, {json.dumps(told)!r}, flush=True); time.sleep(1000)"
    )
    monkeypatch.setattr(WrapperLauncher, "program", (sys.executable, "-c", text))
    monkeypatch.setattr(scheduler_process, "END_SECONDS", 1.0)
    with pytest.raises(isotrain.RunFailedError, match=lost):
        run(tmp_path)


def test_output_of_a_rank_is_not_taken_for_events(tmp_path: Path) -> None:
    events: list[Any] = []
    local = run(tmp_path, "local")
    driven = run(tmp_path, data="integration.scheduler_job:data_that_print", events=events)
    assert driven.history.loss == local.history.loss
    shown = "".join(event["text"] for event in events if event["event"] == "output")
    for line in scheduler_job.LIKE_EVENTS:
        assert line in shown


def test_a_submission_ends_when_one_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other commands wait for it, and the cleanup command fails too."""

    def submission(self: WrapperLauncher, command: RankCommand) -> Submission:
        waiting = (sys.executable, "-c", "import time; time.sleep(1000)")
        return Submission((("false",), waiting), cleanup_commands=(("no-such-program",),))

    monkeypatch.setattr(WrapperLauncher, "submission", submission)
    monkeypatch.setattr(scheduler_process, "END_SECONDS", 1.0)
    with pytest.raises(isotrain.RunFailedError, match="wrapper ended with exit code 1"):
        run(tmp_path)
    running = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert not [command for command in running if "import time; time.sleep(1000)" in command]


def test_cleanup_follows_a_killed_launcher_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path / "ended"

    def submission(self: WrapperLauncher, command: RankCommand) -> Submission:
        return Submission(
            (("sh", "-c", "kill -KILL $$"),), cleanup_commands=(("touch", str(ended)),)
        )

    monkeypatch.setattr(WrapperLauncher, "submission", submission)
    with pytest.raises(isotrain.RunFailedError, match="wrapper ended by signal 9"):
        run(tmp_path)
    assert ended.exists()


def end_with_its_run(program: str, folder: Path, seconds: float) -> None:
    """Returns when the command is gone, for its output ends then."""
    killed = [sys.executable, "-c", KILLED, program, str(folder), str(seconds)]
    subprocess.run(killed, stdout=subprocess.PIPE, timeout=60, check=False)


def test_a_launcher_program_whose_run_was_killed_is_terminated(tmp_path: Path) -> None:
    """It ends the processes that it started elsewhere."""
    end_with_its_run(HEEDFUL, tmp_path, 60.0)
    wait_until((tmp_path / "last").exists, 60)
    assert {"waits", "asked", "last"} == {file.name for file in tmp_path.iterdir()}


def test_a_launcher_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    end_with_its_run(DEAF, tmp_path, 0.1)
    assert (tmp_path / "waits").exists()


def test_objects_in_a_spec_are_refused(tmp_path: Path) -> None:
    with pytest.raises(isotrain.PlanError, match=r"model: expected .*; received an object"):
        run(tmp_path, model=lambda: None)
    with pytest.raises(
        isotrain.PlanError, match="interface: all processes of this run are on this"
    ):
        isotrain.run(SPEC, backend="reference", output=tmp_path / "b", interface="lo")
    assert not (tmp_path / "b").exists()
    with pytest.raises(isotrain.PlanError, match="your own loop"):
        isotrain.launch(print, SPEC, backend="reference", launcher="wrapper", output=tmp_path / "a")
    names = NameMap({f"dense-{number}": MappedTensor(f"fc{number}") for number in range(4000)})
    with pytest.raises(isotrain.PlanError, match=r"work 'trace' has \d{6} bytes .* at most 120000"):
        isotrain.launch(
            Trace(2, names),
            SPEC,
            backend="reference",
            launcher="wrapper",
            output=tmp_path / "c",
        )


def test_an_interrupt_ends_the_launcher_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the program's first output: before, there may be nothing to end."""
    program = (sys.executable, "-uc", "import time; print('here'); time.sleep(1000)")
    monkeypatch.setattr(WrapperLauncher, "program", program)
    interrupting = SimpleNamespace(append=lambda event: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, events=interrupting)
    running = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    assert not [command for command in running if program[-1] in command]


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the report, whose plots take longer than a run."""
    monkeypatch.setattr(page, "REPORT_PACKAGES", ("no_such_package",))


@pytest.mark.usefixtures("no_report")
def test_cells_of_a_comparison_use_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Far, "folder", str(tmp_path / "there"))
    found = isotrain.compare(
        {**SPEC, "checkpoint": {"every_steps": 1}},
        backends=["reference", "tf-mirrored"],
        repeats=1,
        run_limit=0.05,
        steps=3,
        output=tmp_path / "found",
        launcher="far",
    )
    (cell, other) = found.cells
    assert (cell.name, cell.status) == ("reference@2", "finished"), cell.reason
    assert (other.name, other.status) == ("tf-mirrored@2", "skipped")
    assert "launcher 'far' does not start backend 'tf-mirrored'" in str(other.reason)
    assert cell.losses == pytest.approx(run(tmp_path, "local").history.loss[:3], rel=1e-12)
    assert (cell.plan["launcher"], cell.plan["launcher_options"]) == ("far", {})
    assert found.settings["launcher"] == {"name": "far", "options": {}}
    assert found.settings["replicas"] == [2]
    assert "All runs were started by launcher far." in text.result(found)
    (repeat,) = cell.repeats
    assert len(repeat.peak_memory_bytes) == 2
    assert 0 < repeat.first_step_s < repeat.run_s


def test_the_clock_of_another_host_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's clock is hours wrong, and shows two seconds from when it was ready."""

    def run_job(*_: Any, on_event: Any, **__: Any) -> list[dict[str, Any]]:
        on_event(Ready(rank=1, time=5.0))
        on_event(Ready(rank=0, time=1000.0))
        on_event(Ready(rank=2, time=5000.0))
        return [{"first_step_at": -1.0, "first_step_time": 1002.0}, {"first_step_at": -2.0}]

    monkeypatch.setattr(runner, "run_job", run_job)
    measurement = Measurement(steps=1, evaluate=False, blocks=1, block_seconds=0.1, seconds=0.1)
    began = time.monotonic()
    spec, chosen = isotrain.load_spec(SPEC), LauncherChoice("wrapper")
    raw = Runner({}, chosen).run(spec, "reference", 1, measurement, tmp_path / "run")
    passed = time.monotonic() - began
    for rank in raw["ranks"]:
        assert 2.0 <= rank["first_step_at"] - raw["started"] <= 2.0 + passed
    monkeypatch.setattr(runner, "run_job", lambda *_, **__: [{"first_step_at": -1.0}])
    with pytest.raises(isotrain.RunFailedError, match="did not say when it was ready"):
        Runner({}, chosen).run(spec, "reference", 1, measurement, tmp_path / "silent")


@pytest.mark.usefixtures("no_report")
def test_options_that_exclude_a_launcher_are_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(isotrain.PlanError, match=r"--interpreter .*launcher 'wrapper'"):
        isotrain.compare(SPEC, interpreters={"reference": sys.executable}, launcher="wrapper")
    with pytest.raises(isotrain.IsotrainError, match="unknown launcher 'wrappe'"):
        isotrain.compare(SPEC, backends=["reference"], launcher="wrappe")
    unlike = {"backends": ["reference"], "replicas": [2, 3], "launcher": "wrapper"}
    with pytest.raises(isotrain.PlanError, match="2 were requested, and wrapper starts 1"):
        isotrain.parity(SPEC, **unlike)
    strategies = {"backends": ["reference"], "strategies": ["data-parallel", "gossip"]}

    def refuse(self: WrapperLauncher, command: RankCommand) -> Submission:
        raise isotrain.PlanError("hosts are not alike")

    monkeypatch.setattr(WrapperLauncher, "submission", refuse)
    with pytest.raises(isotrain.PlanError, match="not alike"):
        isotrain.parity(SPEC, **strategies, launcher="wrapper", output=tmp_path / "refused")
    monkeypatch.setattr(WrapperLauncher, "starts", False)
    for command in (isotrain.parity, isotrain.compare):
        with pytest.raises(isotrain.PlanError, match="starts nothing"):
            command(SPEC, **strategies, launcher="wrapper", output=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_ranks_refuse_unknown_internal_work(tmp_path: Path) -> None:
    names = NameMap({"dense": MappedTensor("fc", "(HW)O->O(HW)", {"H": 2})})
    trace = Trace(3, names, "initial.npz", True, str(tmp_path / "seen"))
    told = parse_internal_work(json.dumps({WORK: trace.name, **trace.fields()}))
    assert told == trace
    with pytest.raises(isotrain.PlanError, match=rf"does not see {tmp_path}, where"):
        told(None)
    for other in ('{"work": "dance"}', '{"work": "measure"}', '{"work": "trace"}', "[]", "measure"):
        with pytest.raises(isotrain.PlanError, match="--internal-work: expected the JSON"):
            parse_internal_work(other)


def test_a_lost_rank_of_an_elastic_run_is_replaced(tmp_path: Path) -> None:
    told: list[Any] = []
    changes: dict[str, Any] = {
        "elastic": {"min": 1, "replacements": 1},
        "callbacks": ["integration.scheduler_job:LosesRankOne"],
        "epochs": 40,
    }
    result = isotrain.run(
        {**SPEC, **changes},
        backend="reference",
        replicas=2,
        launcher="two-here",
        output=tmp_path / "elastic",
        on_event=told.append,
    )
    lost, joined = (each for each in told if each["event"] == "members changed")
    assert ([*lost["lost"]], lost["members"]) == (["1"], [0])
    assert (joined["joined"], joined["members"]) == ([2], [0, 2])
    expected = isotrain.run(
        {**SPEC, "epochs": 40},
        backend="reference",
        replicas=2,
        output=tmp_path / "undisturbed",
        quiet=True,
    )
    np.testing.assert_allclose(result.history.loss, expected.history.loss, rtol=0, atol=1e-12)
