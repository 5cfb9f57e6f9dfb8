"""The arguments of the commands that look at what runs have left, or leave while they go on."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import non_negative_int
from isotrain.core.cli.command import Command


def _add_runs_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default="runs",
        help="where the run directories are, or one of them (default: runs)",
    )


def _add_logs_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="directory of the run")
    command.add_argument(
        "--rank", type=non_negative_int, default=0, metavar="N", help="whose output (default: 0)"
    )
    command.add_argument(
        "--follow", action="store_true", help="go on printing what comes, until the run has ended"
    )


RUNS = Command(
    "runs",
    "list runs and how far they came",
    "Lists the runs whose directories are in a folder: what became of them, how far they came.",
    """\
examples:
  isotrain runs
  isotrain runs /scratch/me/runs --json""",
    add_arguments=_add_runs_arguments,
    module="isotrain.core.cli.record_commands",
)
LOGS = Command(
    "logs",
    "print what a rank has printed",
    "Prints what a rank of a run has printed, also while the run goes on.",
    """\
examples:
  isotrain logs runs/digits-20260102-030405
  isotrain logs runs/digits-20260102-030405 --rank 3 --follow""",
    add_arguments=_add_logs_arguments,
    module="isotrain.core.cli.record_commands",
)
