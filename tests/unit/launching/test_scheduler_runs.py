"""What a launcher program gets to start on every rank, and how its commands are followed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

import isotrain
from isotrain.core.cli.main import main
from isotrain.core.contracts.device_mesh import DeviceMesh
from isotrain.core.contracts.events import FilePart, event_from_dict
from isotrain.core.contracts.job import PluginChoice
from isotrain.core.contracts.launcher import RankCommand, Submission
from isotrain.core.errors import PlanError
from isotrain.core.launching.run_directory import remote_run_files
from isotrain.core.launching.scheduler import scheduler_process, scheduler_run
from isotrain.core.launching.scheduler.scheduler_process import SchedulerProcess
from isotrain.core.launching.scheduler.scheduler_run import rank_command
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.launchers.slurm import SlurmLauncher

PLAN = {"run": "a run", "backend": "reference", "requested_collective": None, "processes": (0, 1)}
RUNNABLE = {
    "model": "builtins:dict",
    "data": "builtins:dict",
    "plugins": ["isotrain.testing.reference"],
}


def spec(**more: Any) -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            "model": "m:model",
            "data": "m:data",
            "loss": "mean_squared_error",
            "optimizer": {"name": "sgd", "lr": 0.1},
            "global_batch_size": 4,
            "epochs": 1,
            **more,
        }
    )


def test_event_lines_have_the_prefix_with_and_without_plugins(
    tmp_path: Path,
) -> None:
    plan: Any = SimpleNamespace(**PLAN)
    plugins = PluginChoice(blocked=("one", "two"))
    command = rank_command(spec(), plan, plugins, tmp_path, None)
    assert command.name.startswith("isotrain-a-run-")
    assert command.options[command.options.index("--line-prefix") + 1] == command.name
    assert command.options[-4:] == ("--block-plugin", "one", "--block-plugin", "two")
    assert "--replicas" not in command.options  # they are as many as the launcher starts
    told = rank_command(spec(), plan, PluginChoice(), tmp_path, None, "ib0").options
    assert told[-2:] == ("--interface", "ib0")


def test_variables_of_a_single_process_are_not_passed_to_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Any = SimpleNamespace(**PLAN)
    for own, expected in (("none", None), ("slurm", "slurm")):
        monkeypatch.setenv("ISOTRAIN_ENVIRONMENT", own)
        command = rank_command(spec(), plan, PluginChoice(), tmp_path, None)
        assert command.variables.get("ISOTRAIN_ENVIRONMENT") == expected
        found = scheduler_run.environment_for(Submission(()), command)
        assert found.get("ISOTRAIN_ENVIRONMENT") == expected


@pytest.mark.parametrize("axis", ["stage", "tensor"])
def test_the_fewest_processes_are_those_of_the_fewest_replicas(tmp_path: Path, axis: str) -> None:
    plan: Any = SimpleNamespace(**{**PLAN, "processes": range(16)})
    plan.replicas, plan.device_mesh = 4, DeviceMesh({"data": 4, axis: 4})
    asked = {"min_replicas": 2, "checkpoint": {"every_steps": 1}}
    command = rank_command(spec(**asked), plan, PluginChoice(), tmp_path, None)
    assert command.fewest_processes == 8
    launcher = SlurmLauncher(nodes=4, tasks_per_node=4, requeue=90)
    assert "#SBATCH --nodes=2-4\n" in launcher.submission(command).files["job.sh"]
    assert rank_command(spec(), plan, PluginChoice(), tmp_path, None).fewest_processes is None
    plan.processes, plan.device_mesh = (0,), DeviceMesh({"data": 4})  # which has all replicas
    assert rank_command(spec(**asked), plan, PluginChoice(), tmp_path, None).fewest_processes == 1


@pytest.mark.parametrize("launcher", ["local", "mpi"])
def test_an_unused_interface_option_is_refused(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = spec(**RUNNABLE)
    with pytest.raises(PlanError, match="interface: all processes of this run are on this machine"):
        isotrain.run(given, backend="reference", launcher=launcher, interface="eth0")
    assert not [*tmp_path.iterdir()]


def test_ranks_are_numbers_or_all(tmp_path: Path) -> None:
    text: Any = "0,1"
    given = spec(**RUNNABLE)
    with pytest.raises(PlanError, match=r"ranks: expected 'all' or .*; received '0,1'"):
        isotrain.run(given, backend="reference", ranks=text, output=tmp_path / "run")


def test_a_spec_too_long_for_a_variable_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"name": "n" * 130_000})
    command = RankCommand("long", tmp_path / "spec.json", text, (), tmp_path)
    with pytest.raises(PlanError, match="at most 120000 can be sent"):
        scheduler_run.environment_for(Submission(()), command)


def test_return_files_are_complete_or_absent(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    content = {"empty": b"", "long": os.urandom(100_000), "plan.json": b"{}", "rank-1.log": b"said"}
    for name, part in content.items():
        (there / name).write_bytes(part)
    (here / "long").write_bytes(b"of a start before")
    parts: list[FilePart] = []
    remote_run_files.return_files(
        there, lambda told: parts.append(cast(FilePart, event_from_dict(told)))
    )
    names, follow = parts[:2], parts[2:]
    assert [part.name for part in names] == ["empty", "long"]
    assert [part.name for part in follow] == ["empty", *["long"] * 4]
    arriving, lost = remote_run_files.FileReceiver(here), list[str]()
    for part in [*names, *follow[:3], *follow[4:]]:
        arriving.take(part)
    for name in ("../out", ".lock", "spec.json", "a/b"):
        arriving.take(FilePart(name=name, begin=0, size=1, data="QQ=="))
    arriving.close(lost.append)
    assert lost == ["long did not arrive: 65536 bytes of it came from the host of rank 0"]
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {
        "empty": b"",
        "long": b"of a start before",
    }
    for rest in (
        names,
        follow[:1] + follow[2:],
    ):  # all of its bytes, or the first of them, are lost
        arriving, lost = remote_run_files.FileReceiver(here), []
        for part in rest:
            arriving.take(part)
        arriving.close(lost.append)
        assert lost == ["long did not arrive: 0 bytes of it came from the host of rank 0"]
    arriving = remote_run_files.FileReceiver(here)
    for part in parts:
        arriving.take(part)
    assert (here / "long").read_bytes() == content["long"]


@pytest.mark.parametrize("mark", [("--line-prefix", "here"), ("--line-prefix=here",)])
def test_an_error_has_the_line_prefix_in_every_form(
    mark: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--no-such-option", "--json", *mark]) == 2
    before, _, told = capsys.readouterr().out.partition(" ")
    assert before == "here"
    assert json.loads(told)["event"] == "error"


def test_a_silent_command_does_not_hide_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_process, "END_SECONDS", 0.3)
    commands = ("exec >&-; exec sleep 1000", "echo said; sleep 0.5; exit 3")
    submission = Submission(tuple(("sh", "-c", command) for command in commands))
    with SchedulerProcess(submission, tmp_path / "log", os.environ) as process:
        assert list(process.lines()) == ["said\n"]
        assert process.status() == 3


def test_an_ended_command_is_reaped_after_the_last_signal(tmp_path: Path) -> None:
    submission = Submission((("sh", "-c", "echo $$; exit 3"),))
    with SchedulerProcess(submission, tmp_path / "log", os.environ) as process:
        (pid,) = map(int, process.lines())
        assert process.status() == 3
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not psutil.pid_exists(pid)
