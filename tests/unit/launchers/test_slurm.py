"""The launcher `slurm`."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from unit.launchers.rank_command import COMMAND, recorded

from isotrain.core.contracts.events import Failed
from isotrain.core.errors import PlanError
from isotrain.launchers.slurm import SlurmLauncher
from isotrain.plugin import HostSlots


class TestSlurm:
    def test_lost_nodes_are_left_out(self) -> None:
        options: dict[str, Any] = {"nodes": 3, "options": "--account=me"}
        for node in ("n2", "n3"):
            options |= SlurmLauncher(**options).without(node)
        assert options == {"nodes": 1, "options": "--account=me --exclude=n2,n3"}
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
        assert SlurmLauncher(**options).allocation_in(job).hosts == ("n1",)
        with pytest.raises(PlanError, match="no node is left without n1"):
            SlurmLauncher(**options).without("n1")

    def test_outside_of_an_allocation_it_asks_for_one(self) -> None:
        launcher = SlurmLauncher(
            nodes=2, tasks_per_node=4, gpus_per_node=4, partition="gpu", time="1:00:00",
            options="--account='my group'",
        )  # fmt: skip
        assert launcher.allocation_in({}).host_slots == (HostSlots(4, None, 4),) * 2
        ((program, *arguments),) = launcher.submission(COMMAND).commands
        assert program == "srun"
        assert arguments[: -len(COMMAND.arguments)] == [
            *("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--kill-on-bad-exit=1"),
            *("--partition=gpu", "--time=1:00:00", "--account=my group"),
            "--job-name=isotrain-digits",
        ]

    def test_tasks_of_an_elastic_run_outlive_each_other(self) -> None:
        elastic = dataclasses.replace(COMMAND, spec_text='{"elastic": {"min": 2}}')
        submission = SlurmLauncher(nodes=2).submission(elastic)
        for command in (submission.commands[0], shlex.split(submission.files["job.sh"])):
            assert {"--kill-on-bad-exit=0", "--wait=0", "--no-kill"} <= {*command}
            assert "--kill-on-bad-exit=1" not in command
        assert "#SBATCH --no-kill\n" in submission.files["job.sh"]
        assert "#SBATCH --no-kill" not in SlurmLauncher(nodes=2).submission(COMMAND).files["job.sh"]

    def test_a_lost_task_is_replaced_by_a_step_or_a_job_of_one_task(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launcher = SlurmLauncher(nodes=4, tasks_per_node=2, partition="cpu")
        joins = dataclasses.replace(COMMAND, name="digits-1", joins=True, options=("--plugin", "p"))
        alike = ("srun", "--nodes=1", "--ntasks=1")
        named = ("--partition=cpu", "--job-name=digits-1", *joins.arguments)
        assert joins.arguments[1:] == (
            "-m",
            "isotrain",
            "join",
            str(COMMAND.run_directory),
            "--plugin",
            "p",
        )
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        assert launcher.replacement(joins).commands == ((*alike, *named),)
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        replacement = launcher.replacement(joins)
        assert replacement.commands == ((*alike, "--overlap", *named),)
        assert replacement.cleanup_commands[0][-2:] == ("7", "digits-1")

    def test_it_ends_its_job_or_its_step_of_another_job(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launcher = SlurmLauncher()
        assert launcher.submission(COMMAND).cleanup_commands == (
            ("scancel", "--name=isotrain-digits"),
        )
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
        (command,) = launcher.submission(COMMAND).cleanup_commands
        assert command[1:] == ("-m", "isotrain.launchers.slurm_cancel", "7", "isotrain-digits")

    def test_the_script_has_the_options_and_the_command(self) -> None:
        launcher = SlurmLauncher(nodes=2, tasks_per_node=2, partition="gpu")
        script = launcher.submission(COMMAND).files["job.sh"].splitlines()
        assert script[0] == "#!/bin/sh"
        assert (
            script[script.index("END", 1) + 1] == ')"'
        )  # shells that split words leave the spec whole
        options = [line.removeprefix("#SBATCH ") for line in script if line.startswith("#SBATCH")]
        assert options == [
            *("--nodes=2", "--ntasks-per-node=2", "--partition=gpu"),
            "--job-name=isotrain-digits",
        ]
        assert shlex.split(script[-1])[-len(COMMAND.arguments) :] == [*COMMAND.arguments]

    def test_a_requeued_job_resumes_from_its_checkpoint(self) -> None:
        launcher = SlurmLauncher(nodes=2, time="1:00:00", requeue=90)
        assert (launcher.starts, SlurmLauncher(nodes=2).starts) == (False, True)
        saving = dataclasses.replace(COMMAND, spec_text='{"checkpoint": {"every_steps": 10}}')
        found = launcher.submission(saving)
        assert found.commands == ()
        script = found.files["job.sh"]
        for option in ("--time=1:00:00", "--requeue", "--open-mode=append", "--signal=TERM@90"):
            assert f"#SBATCH {option}\n" in script
        (run,) = (line for line in script.splitlines() if line.startswith("srun "))
        assert shlex.split(run)[-4:-2] == ["--resume", "auto"]
        assert "#SBATCH --nodes=2\n" in script
        assert "--nodes=2" in run
        with pytest.raises(PlanError, match="the spec asks for none"):
            launcher.submission(COMMAND)
        resuming = dataclasses.replace(saving, options=(*saving.options, "--resume", "a/run"))
        with pytest.raises(PlanError, match="leave --resume out"):
            launcher.submission(resuming)

    def test_a_requeued_job_needs_the_nodes_of_the_fewest_replicas(self) -> None:
        spec = '{"checkpoint": {"every_steps": 10}}'
        saving = dataclasses.replace(COMMAND, spec_text=spec, fewest_processes=5)
        launcher = SlurmLauncher(nodes=4, tasks_per_node=2, requeue=90)
        script = launcher.submission(saving).files["job.sh"]
        assert "#SBATCH --nodes=3-4\n#SBATCH --mincpus=2\n" in script
        assert "#SBATCH --ntasks-per-node" not in script
        (run,) = (line for line in script.splitlines() if line.startswith("srun "))
        assert run.startswith("srun --ntasks-per-node=2 --kill-on-bad-exit=1 ")
        least = SlurmLauncher(nodes=3, tasks_per_node=2, requeue=90).submission(saving)
        assert "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=2\n" in least.files["job.sh"]
        for options in ("--cpus-per-task=4", "--mem=4G -c 4", "-c4"):
            wide = SlurmLauncher(nodes=4, tasks_per_node=2, requeue=90, options=options)
            assert "#SBATCH --mincpus=8\n" in wide.submission(saving).files["job.sh"]

    @pytest.mark.parametrize(("error", "again"), [("EndedError", True), ("E", False)])
    def test_a_job_is_requeued_only_after_a_requested_end(
        self, error: str, again: bool, tmp_path: Path
    ) -> None:
        """The exit code is also that of tasks that SLURM ends after a failure; scripts stand in for it."""
        command = dataclasses.replace(
            COMMAND,
            spec_text='{"checkpoint": {"every_steps": 1}}',
            run_directory=tmp_path / "a run",
        )
        (tmp_path / "job.sh").write_text(
            SlurmLauncher(nodes=1, requeue=60).submission(command).files["job.sh"]
        )
        event = Failed(error=error, message="", traceback="", is_peer_error=False)
        (tmp_path / "told").write_bytes(event.to_line())
        told = """printf '%s' "$ISOTRAIN_SPEC" > spec; cat told >> 'a run/events.jsonl'"""
        programs = {"srun": f"mkdir -p 'a run'; {told}; exit 143"}
        for name, text in {**programs, "scontrol": "echo $* >> asked"}.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        for _ in range(2):
            done = subprocess.run(["sh", "job.sh"], cwd=tmp_path, env=variables, check=False)
            assert done.returncode == 143
        asked = tmp_path / "asked"
        assert (asked.read_text() if asked.exists() else "") == again * ("requeue 7\n" * 2)
        assert (tmp_path / "spec").read_text() == command.spec_text

    @pytest.mark.parametrize("name", ["sbatch-script", "sbatch"])
    def test_within_an_allocation_it_takes_what_is_there(self, name: str) -> None:
        allocation = SlurmLauncher().allocation_in(recorded(name))
        assert allocation.host_slots == (HostSlots(2, "node1"), HostSlots(2, "node2"))
        assert SlurmLauncher(gpus_per_node=2).allocation_in(recorded(name)).devices == 2
        one = SlurmLauncher(nodes=1, tasks_per_node=3).allocation_in(recorded(name))
        assert one.host_slots == (HostSlots(3, "node1"),)

    def test_requested_replicas_are_tasks_of_a_new_allocation(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "environ", {})
        assert SlurmLauncher().options_for(4) == {"tasks_per_node": 4}
        assert SlurmLauncher(nodes=2).options_for(4) == {"tasks_per_node": 2}
        assert SlurmLauncher(nodes=3).options_for(4) == {}, "no number of tasks for each node fits"
        assert SlurmLauncher(tasks_per_node=1).options_for(4) == {}
        monkeypatch.setattr(os, "environ", recorded("sbatch-script"))
        assert SlurmLauncher().options_for(4) == {}

    def test_more_than_was_allocated_is_refused(self) -> None:
        with pytest.raises(PlanError, match=r"3 were requested, and job 1 has 2 \(node\[1-2\]\)"):
            SlurmLauncher(nodes=3).allocation_in(recorded("sbatch-script"))

    def test_uneven_tasks_must_be_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        uneven = {**recorded("sbatch-script"), "SLURM_TASKS_PER_NODE": "2,1"}
        monkeypatch.setattr(os, "environ", uneven)
        with pytest.raises(PlanError, match="tasks_per_node: the allocation has 2,1"):
            SlurmLauncher().submission(COMMAND)
