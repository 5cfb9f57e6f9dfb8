"""SLURM: `srun` starts the ranks, in the allocation that this process is in or in one of its own."""

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
_AGAIN = """\
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
    """Has `srun` start the ranks; `job.sh` among its files does the same when given to `sbatch`."""

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
        """Takes what to ask SLURM for.

        Args:
            nodes: How many; left out: all of this allocation, or one.
            tasks_per_node: Processes on each; left out: as this allocation says, or one.
            gpus_per_node: GPUs of each; left out: as `options` or the allocation say.
            partition: Where to wait; left out: SLURM's default.
            time: The limit, as SLURM writes it.
            options: Further options of srun and sbatch, as in a shell: `--account=me --mem=4G`.
            requeue: Seconds before the time limit at which a job of `job.sh` saves a checkpoint, ends, and is
                started anew to go on from there; 0: it is not.
        """
        self._nodes = nodes
        self._tasks = tasks_per_node
        self._gpus = gpus_per_node
        self._wanted = {"partition": partition, "time": str(time)}
        self._further = shlex.split(options)
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
        """As `allocation`, for a process with these variables.

        Raises:
            PlanError: More is asked for than was allocated.
            ClusterInfoError: What is told of the allocation is half set, or does not fit.
        """
        if "SLURM_JOB_ID" not in variables:
            share = HostSlots(self._tasks or 1, devices=self._gpus)
            return Allocation((share,) * (self._nodes or 1))
        shares = slurm_host_slots(variables, self._tasks, self._gpus)
        count = self._nodes or len(shares)
        if count > len(shares):
            raise PlanError(
                f"slurm: nodes: {count} were asked for, and job {variables['SLURM_JOB_ID']} has"
                f" {len(shares)} ({variables['SLURM_JOB_NODELIST']})."
            )
        left = [share for share in shares if share.host not in self._excluded]
        return Allocation(tuple(left)[:count])

    def without(self, host: str) -> Mapping[str, Any]:
        nodes = len(self.allocation().host_slots) - 1
        if nodes == 0:
            raise PlanError(f"slurm: no node is left without {host}.")
        excluded = f"{_EXCLUDE}{','.join([*self._excluded, host])}"
        others = [option for option in self._further if not option.startswith(_EXCLUDE)]
        return {"nodes": nodes, "options": shlex.join([*others, excluded])}

    def submission(self, command: RankCommand) -> Submission:
        allocation = self.allocation()
        if not allocation.is_even:
            found = ",".join(str(share.slots) for share in allocation.host_slots)
            raise PlanError(
                f"slurm: tasks_per_node: the allocation has {found} tasks on its nodes; say how many"
                " each of them is to run."
            )
        size = self._size(allocation)
        job = [*self._asked(), f"--job-name={command.name}"]
        # A rank that fails ends the others' tasks as well, and nobody waits for those that hang.
        step = ("srun", *size, "--kill-on-bad-exit=1")
        script = self._script(step, (*size, *job), command)
        commands = ((*step, *job, *command.arguments),) if self.starts else ()
        # What srun cannot reach, and all that it has started where it is killed, is kept when srun is gone.
        ending = _ending(command.name, os.environ.get("SLURM_JOB_ID"))
        return Submission(commands, files={"job.sh": script}, cleanup_commands=(ending,))

    def _script(self, step: Sequence[str], options: Sequence[str], command: RankCommand) -> str:
        command = replace(command, follow_options=())
        run = shlex.join([*step, *command.arguments])
        if self._requeue:
            signal = f"--signal=TERM@{self._requeue}"
            if fewest := _fewest_nodes(self.allocation(), command):
                # srun takes the nodes that there are
                step = [part for part in step if part != options[0]]
                options = self._on_fewer(options, fewest)
            options = (*options, "--requeue", "--open-mode=append", signal)
            again = shlex.join([*step, *_going_on(command).arguments])
            events = shlex.quote(str(command.run_directory / "events.jsonl"))
            run = _AGAIN.format(command=again, events=events)
        asked = "\n".join(f"#SBATCH {option}" for option in options)
        spec = {"variable": command.spec_variable, "spec": command.spec_text}
        return _SCRIPT.format(options=asked, command=run, **spec)

    def _on_fewer(self, options: Sequence[str], fewest: int) -> list[str]:
        """The options of a job that may start anew on fewer nodes.

        SLURM keeps how many tasks a job has had, and waits for nodes for all of them: where it is asked for
        processors instead, it takes the nodes that it can have.
        """
        nodes, tasks, *others = options
        count = int(tasks.partition("=")[2]) * _cpus_per_task(self._further)
        return [nodes.replace("=", f"={fewest}-"), f"--mincpus={count}", *others]

    def _size(self, allocation: Allocation) -> list[str]:
        shares = allocation.host_slots
        size = [f"--nodes={len(shares)}", f"--ntasks-per-node={shares[0].slots}"]
        return [*size, f"--gpus-per-node={self._gpus}"] if self._gpus else size

    @property
    def _excluded(self) -> list[str]:
        """The nodes that are not to be used."""
        found = (o.removeprefix(_EXCLUDE) for o in self._further if o.startswith(_EXCLUDE))
        return [node for nodes in found for node in host_list(nodes)]

    def _asked(self) -> list[str]:
        named = [f"--{name}={value}" for name, value in self._wanted.items() if value]
        return [*named, *self._further]


def _ending(name: str, job: str | None) -> tuple[str, ...]:
    """What ends a job of that name, or the step of it in the job that this process is in."""
    return ("scancel", f"--name={name}") if job is None else (*_PROGRAM, job, name)


def _cpus_per_task(options: Sequence[str]) -> int:
    """As `sbatch` reads it: the last counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--cpus-per-task", default="1")
    count: str = parser.parse_known_args([*options])[0].cpus_per_task
    return int(count) if count.isdecimal() else 1


def _fewest_nodes(allocation: Allocation, command: RankCommand) -> int | None:
    """On how few nodes a job may start anew; None: on no fewer than it began."""
    if command.fewest_processes is None:
        return None
    nodes = math.ceil(command.fewest_processes / allocation.host_slots[0].slots)
    return nodes if nodes < len(allocation.host_slots) else None


def _going_on(command: RankCommand) -> RankCommand:
    """The command that goes on from its own newest checkpoint, if it has one.

    Raises:
        PlanError: It has none to go on from, or was told another.
    """
    if "--resume" in command.options:
        raise PlanError(
            "slurm: requeue: a job that is started anew goes on from its own checkpoints; leave --resume out."
        )
    if not json.loads(command.spec_text).get("checkpoint"):
        raise PlanError(
            "slurm: requeue: a job that is started anew goes on from a checkpoint, and the spec asks for"
            " none. Add `checkpoint`, such as --set checkpoint.every_minutes=10."
        )
    return replace(command, options=(*command.options, "--resume", "auto"))
