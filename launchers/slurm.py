"""SLURM: `srun`, in the job allocation of this process or in a new one; and a script for `sbatch`."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from isotrain.launchers.batch_job import slurm_host_slots
from isotrain.plugin import (
    Allocation,
    Availability,
    HostSlots,
    PlanError,
    RankCommand,
    SchedulerLauncher,
    Submission,
    host_list,
)

_PROGRAM = (sys.executable, "-m", "isotrain.launchers.slurm_cancel")
_JOB_SCRIPT = "job.sh"
_SCRIPT = """\
#!/bin/sh
{options}

export {variable}="$(cat << 'END'
{spec}
END
)"
{command}
"""
_EXCLUDE = "--exclude="
_NO_KILL = "--no-kill"
_REQUEUE_SCRIPT = """\
ended_as_asked() {{
    cat {events} 2> /dev/null | grep -c '"error": "EndedError"'
}}
before=$(ended_as_asked)
{command}
status=$?
# Only when this start of the run was told to end, saved a checkpoint and ended: not when it failed.
if [ "$(ended_as_asked)" -gt "$before" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"\
"""


class SlurmLauncher(SchedulerLauncher):
    """Starts the ranks by `srun`; also writes `job.sh`, a script for `sbatch` that does the same."""

    name = "slurm"
    summary = "tasks of srun, in this allocation or in a new one"

    def __init__(
        self,
        nodes: int | None = None,
        tasks_per_node: int | None = None,
        gpus_per_node: int | None = None,
        partition: str = "",
        time: str = "",
        options: str = "",
        requeue: int = 0,
    ) -> None:
        """Keeps the options.

        Args:
            nodes: Number of nodes; left out: all nodes of this allocation, else 1.
            tasks_per_node: Processes on each node; left out: as this allocation says, else 1.
            gpus_per_node: GPUs of each node; left out: as `options` or the allocation say.
            partition: Partition to submit to; left out: SLURM's default.
            time: Time limit, in SLURM's format.
            options: Further options of srun and sbatch, as in a shell: `--account=me --mem=4G`.
            requeue: Seconds before the time limit at which a job of `job.sh` saves a checkpoint, ends, and is
                requeued to resume from it; 0: no requeue.
        """
        self._nodes = nodes
        self._tasks = tasks_per_node
        self._gpus = gpus_per_node
        self._named_options = {"partition": partition, "time": str(time)}
        self._extra_options = shlex.split(options)
        self._requeue = requeue

    def availability(self) -> Availability:
        if shutil.which("srun") is None:
            hint = "run it where SLURM's commands are, such as on a login node"
            return Availability(False, None, "there is no srun", hint)
        return Availability(True)

    @property
    def starts(self) -> bool:
        return not self._requeue

    def allocation(self) -> Allocation:
        return self.allocation_in(os.environ)

    def allocation_in(self, variables: Mapping[str, str]) -> Allocation:
        """`allocation` of a process with these environment variables.

        Raises:
            PlanError: More nodes are requested than allocated.
            ClusterInfoError: The variables are incomplete, or contradict each other.
        """
        if "SLURM_JOB_ID" not in variables:
            new_node = HostSlots(self._tasks or 1, devices=self._gpus)
            return Allocation((new_node,) * (self._nodes or 1))
        host_slots = slurm_host_slots(variables, self._tasks, self._gpus)
        count = self._nodes or len(host_slots)
        if count > len(host_slots):
            raise PlanError(
                f"slurm: nodes: {count} were requested, and job {variables['SLURM_JOB_ID']} has"
                f" {len(host_slots)} ({variables['SLURM_JOB_NODELIST']})."
            )
        usable = [each for each in host_slots if each.host not in self._excluded]
        return Allocation(tuple(usable)[:count])

    def options_for(self, processes: int) -> Mapping[str, Any]:
        nodes = self._nodes or 1
        if self._tasks is not None or "SLURM_JOB_ID" in os.environ or processes % nodes:
            return {}
        return {"tasks_per_node": processes // nodes}

    def why_not_elastic(self) -> str | None:
        return None

    def without(self, host: str) -> Mapping[str, Any]:
        nodes = len(self.allocation().host_slots) - 1
        if nodes == 0:
            raise PlanError(f"slurm: no node is left without {host}.")
        excluded = f"{_EXCLUDE}{','.join([*self._excluded, host])}"
        others = [option for option in self._extra_options if not option.startswith(_EXCLUDE)]
        return {"nodes": nodes, "options": shlex.join([*others, excluded])}

    def submission(self, command: RankCommand) -> Submission:
        allocation = self.allocation()
        if not allocation.is_even:
            slots = ",".join(str(each.slots) for each in allocation.host_slots)
            raise PlanError(
                f"slurm: tasks_per_node: the allocation has {slots} tasks on its nodes; set the number of"
                " tasks for each node."
            )
        size = self._size_options(allocation)
        job = [*self._options(), f"--job-name={command.name}"]
        step = ("srun", *size, *_step_options(command))
        script = self._script(step, (*size, *job), command)
        commands = ((*step, *job, *command.arguments),) if self.starts else ()
        # Tasks on unreachable nodes, and all tasks of a killed srun, outlive srun.
        cancel = _cancel_command(command.name, os.environ.get("SLURM_JOB_ID"))
        return Submission(
            commands,
            files={_JOB_SCRIPT: script},
            cleanup_commands=(cancel,),
            submit_with={_JOB_SCRIPT: ("sbatch",)},
        )

    def replacement(self, command: RankCommand) -> Submission:
        """A step with one task on any node of this allocation, else a job of its own."""
        job = os.environ.get("SLURM_JOB_ID")
        # The step of the run keeps the resources of its lost task.
        overlap = () if job is None else ("--overlap",)
        step = ("srun", "--nodes=1", "--ntasks=1", *overlap, *self._options())
        return Submission(
            ((*step, f"--job-name={command.name}", *command.arguments),),
            cleanup_commands=(_cancel_command(command.name, job),),
        )

    def _script(self, step: Sequence[str], options: Sequence[str], command: RankCommand) -> str:
        if command.is_elastic:
            options = (*options, _NO_KILL)  # else the allocation ends with a lost node
        command = replace(command, follow_options=())
        run = shlex.join([*step, *command.arguments])
        if self._requeue:
            signal = f"--signal=TERM@{self._requeue}"
            if min_nodes := _min_nodes(self.allocation(), command):
                # without --nodes, srun uses all nodes that the job has got
                step = [part for part in step if part != options[0]]
                options = self._with_min_nodes(options, min_nodes)
            options = (*options, "--requeue", "--open-mode=append", signal)
            resume = shlex.join([*step, *_resuming(command).arguments])
            events = shlex.quote(str(command.run_directory / "events.jsonl"))
            run = _REQUEUE_SCRIPT.format(command=resume, events=events)
        lines = "\n".join(f"#SBATCH {option}" for option in options)
        spec = {"variable": command.spec_variable, "spec": command.spec_text}
        return _SCRIPT.format(options=lines, command=run, **spec)

    def _with_min_nodes(self, options: Sequence[str], min_nodes: int) -> list[str]:
        """Options of a job that may be requeued with fewer nodes.

        SLURM keeps a job's number of tasks, and waits for nodes for all of them. If the job requests CPUs
        per node instead, it starts on any number of nodes from the minimum on.
        """
        nodes, tasks, *others = options
        count = int(tasks.partition("=")[2]) * _cpus_per_task(self._extra_options)
        return [nodes.replace("=", f"={min_nodes}-"), f"--mincpus={count}", *others]

    def _size_options(self, allocation: Allocation) -> list[str]:
        host_slots = allocation.host_slots
        size = [f"--nodes={len(host_slots)}", f"--ntasks-per-node={host_slots[0].slots}"]
        return [*size, f"--gpus-per-node={self._gpus}"] if self._gpus else size

    @property
    def _excluded(self) -> list[str]:
        """Names of the excluded nodes."""
        lists = (o.removeprefix(_EXCLUDE) for o in self._extra_options if o.startswith(_EXCLUDE))
        return [node for nodes in lists for node in host_list(nodes)]

    def _options(self) -> list[str]:
        named = [f"--{name}={value}" for name, value in self._named_options.items() if value]
        return [*named, *self._extra_options]


def _step_options(command: RankCommand) -> tuple[str, ...]:
    """Options of `srun` that say what becomes of the other tasks when one fails, or its node.

    SLURM ends them, hanging ones included, but those of elastic runs.
    """
    if command.is_elastic:
        return ("--kill-on-bad-exit=0", "--wait=0", _NO_KILL)
    return ("--kill-on-bad-exit=1",)


def _cancel_command(name: str, job: str | None) -> tuple[str, ...]:
    """Command that cancels the job of that name, or the step of that name in this process's job."""
    return ("scancel", f"--name={name}") if job is None else (*_PROGRAM, job, name)


def _cpus_per_task(options: Sequence[str]) -> int:
    """Value of `--cpus-per-task`, the last one as in `sbatch`; 1 by default."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--cpus-per-task", default="1")
    count: str = parser.parse_known_args([*options])[0].cpus_per_task
    return int(count) if count.isdecimal() else 1


def _min_nodes(allocation: Allocation, command: RankCommand) -> int | None:
    """Smallest number of nodes for a requeued job; None: as many as at first."""
    if command.fewest_processes is None:
        return None
    nodes = math.ceil(command.fewest_processes / allocation.host_slots[0].slots)
    return nodes if nodes < len(allocation.host_slots) else None


def _resuming(command: RankCommand) -> RankCommand:
    """The command with `--resume auto`: it resumes from the run's newest checkpoint, if there is one.

    Raises:
        PlanError: The spec saves no checkpoints, or the command has `--resume` already.
    """
    if "--resume" in command.options:
        raise PlanError(
            "slurm: requeue: a requeued job resumes from its own checkpoints; leave --resume out."
        )
    if not json.loads(command.spec_text).get("checkpoint"):
        raise PlanError(
            "slurm: requeue: a requeued job resumes from a checkpoint, and the spec asks for none. Add"
            " `checkpoint`, such as --set checkpoint.every_minutes=10."
        )
    return replace(command, options=(*command.options, "--resume", "auto"))
