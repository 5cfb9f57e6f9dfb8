"""The arguments of the commands that look at what runs have left, or leave while they go on."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import count_or_zero

RUNS_EXAMPLES = """\
examples:
  isotrain runs
  isotrain runs /scratch/me/runs --json"""
LOGS_EXAMPLES = """\
examples:
  isotrain logs runs/digits-20260102-030405
  isotrain logs runs/digits-20260102-030405 --rank 3 --follow"""
DESCRIPTIONS = {
    "runs": "Lists the runs whose directories are in a folder: what became of them, how far they came.",
    "logs": "Prints what a rank of a run has printed, also while the run goes on.",
}


def describe_runs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default="runs",
        help="where the run directories are, or one of them (default: runs)",
    )


def describe_logs(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="directory of the run")
    command.add_argument(
        "--rank", type=count_or_zero, default=0, metavar="N", help="whose output (default: 0)"
    )
    command.add_argument(
        "--follow", action="store_true", help="go on printing what comes, until the run has ended"
    )
