"""The arguments of `isotrain config`."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import positive_int
from isotrain.core.cli.command import Command


def _add_config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--backend",
        metavar="NAME[:COLLECTIVE]",
        help="what to run on; `isotrain backends` lists all",
    )
    command.add_argument(
        "--launcher",
        metavar="NAME",
        help="what starts the processes; `isotrain launchers` lists all",
    )
    command.add_argument(
        "--launcher-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the launcher, such as nodes=2 of slurm; may be repeated",
    )
    command.add_argument(
        "--replicas", type=positive_int, metavar="N", help="how many copies of the model train together"
    )
    command.add_argument("--precision", metavar="TYPE", help="such as float32 or bfloat16")
    command.add_argument(
        "--spec", metavar="SPEC", help="a spec that is there already; no skeleton is written then"
    )
    command.add_argument(
        "--directory",
        default=".",
        metavar="DIR",
        help="where to write launch.sh and train.yaml (default: here)",
    )


CONFIG = Command(
    "config",
    "write a script that launches a training",
    "Asks a few questions, where options do not answer them, and writes a script that launches a\n"
    "training, and the skeleton of its spec. Outside of a terminal nothing is asked: defaults are taken.",
    """\
examples:
  isotrain config
  isotrain config --backend torch-ddp --replicas 2 --directory digits
  isotrain config --backend tf-multiworker:ring --launcher slurm --launcher-option nodes=2 \\
      --spec digits.yaml""",
    add_arguments=_add_config_arguments,
    module="isotrain.core.cli.config_command",
)
