"""Arguments of the commands that train, or say how they would, with the texts of their `--help`."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import (
    name_with_options,
    non_negative_int,
    port,
    ranks,
    target,
)
from isotrain.core.cli.command import Command
from isotrain.core.cli.common_options import (
    add_backend_arguments,
    add_override_arguments,
    add_spec_arguments,
)


def _add_run_arguments(command: argparse.ArgumentParser) -> None:
    add_spec_arguments(command)
    add_backend_arguments(command, required=True)
    command.add_argument(
        "--run-dir",
        metavar="DIR",
        help="new or empty folder for the run's files (default: runs/NAME-TIME)",
    )
    command.add_argument(
        "--logger",
        type=name_with_options,
        action="append",
        default=[],
        metavar="NAME[,OPTION=VALUE...]",
        help="write down how the run goes, also with this: csv, jsonl, tensorboard, ...; may be repeated",
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="only write what the launcher would give to its engine, such as a script for sbatch",
    )
    command.add_argument(
        "--return-files",
        action="store_true",
        help="with --line-prefix and --run-dir: at the end, print the run's files too, for who"
        " follows it from where"
        " they cannot be seen; who sees them has put a file named by the mark beside the run directory",
    )
    command.add_argument(
        "--internal-work",
        metavar="JSON",
        help="with --json, --line-prefix and --run-dir: do this in the place of training; what `compare` and"
        " `parity` tell the ranks that they have had started by --launcher",
    )
    command.add_argument(
        "--resume",
        metavar="FROM",
        help="go on from a checkpoint, or the newest of a folder or run directory; `auto`: from the newest in"
        " --run-dir or the spec's checkpoint.folder, if there is one",
    )
    _add_watching_arguments(command)


def _add_resume_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    command.add_argument(
        "--spec",
        metavar="SPEC",
        help="what to train, where it is to differ (default: the run's own)",
    )
    add_override_arguments(command)
    add_backend_arguments(command, required=False, default="the run's own")
    _add_watching_arguments(command)


def _add_plan_arguments(command: argparse.ArgumentParser) -> None:
    add_spec_arguments(command)
    add_backend_arguments(command, required=False)
    command.add_argument(
        "--diff",
        nargs=2,
        type=target,
        metavar=("A", "B"),
        help="instead of --backend: print what differs between two plans, each of the form"
        " 'NAME[:COLLECTIVE][@REPLICAS][ STRATEGY]'",
    )
    command.add_argument(
        "--no-measure",
        action="store_true",
        help="start no process to count samples, parameters and bytes: quick, and says less",
    )


def _add_watching_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--port",
        type=port,
        metavar="P",
        help="use this port and those after it (default: free ones)",
    )
    command.add_argument(
        "--interface",
        metavar="NAME",
        help="network interface, by name or address, over which processes on several hosts talk (default: the"
        " one of ISOTRAIN_INTERFACE, else that over which each host reaches rank 0)",
    )
    command.add_argument(
        "--max-restarts",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="start again from the last checkpoint after a failure, at most so often (default: 0)",
    )
    command.add_argument(
        "--ranks",
        type=ranks,
        default=(0,),
        metavar="N,...",
        help="whose output to show, such as 0,3, or all (default: 0); all of it is in the run directory",
    )
    command.add_argument("--quiet", action="store_true", help="print nothing but the result")
    command.add_argument(
        "--line-prefix",
        default="",
        metavar="TEXT",
        help="with --json: put this before each line, to tell them from what the training itself prints",
    )


RUN = Command(
    "run",
    "train a spec under a backend",
    "Trains a spec under a backend, in processes of its own on this machine.\nProgress goes to"
    " standard error, the result to standard output.",
    """\
examples:
  isotrain run digits.yaml --backend torch-ddp
  isotrain run digits.yaml --backend tf-multiworker:ring --replicas 2
  isotrain run digits.yaml --backend torch-ddp --set optimizer.lr=0.05 --set epochs=3
  isotrain run digits.yaml --backend tf-mirrored --replicas 2 --strategy local-sgd,every=8
  isotrain run digits.yaml --backend torch-ddp --set checkpoint.every_minutes=10 --max-restarts 3
  isotrain run digits.yaml --backend horovod-torch --json > events.jsonl""",
    add_arguments=_add_run_arguments,
)
RESUME = Command(
    "resume",
    "go on with a run",
    "Goes on with a run in its own directory, from its newest checkpoint: also under another\n"
    "backend, with another number of replicas or another strategy. What is computed stays the same.",
    """\
examples:
  isotrain resume runs/digits-20260102-030405
  isotrain resume runs/digits-20260102-030405 --backend tf-multiworker --replicas 3
  isotrain resume runs/digits-20260102-030405 --set epochs=20 --max-restarts 3""",
    add_arguments=_add_resume_arguments,
)
PLAN = Command(
    "plan",
    "show what a run would do",
    "Resolves a run without training: who runs where, the collective that will really be used,\n"
    "batches, learning rate, variables, exchanged bytes. With --diff, compares two of them.",
    """\
examples:
  isotrain plan digits.yaml --backend torch-ddp --replicas 2
  isotrain plan digits.yaml --backend torch-ddp --replicas 8 --no-measure
  isotrain plan digits.yaml --diff torch-ddp@2 tf-multiworker:ring@2
  isotrain plan digits.yaml --diff torch-ddp@2 'torch-ddp@2 local-sgd,every=8'""",
    add_arguments=_add_plan_arguments,
)
