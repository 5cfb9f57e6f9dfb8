"""Arguments of the commands that say what there is and whether it works, with the texts of `--help`."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import option
from isotrain.core.cli.command import Command


def _add_plugins_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("spec", metavar="SPEC", nargs="?", help="also load what this spec names")


def _add_doctor_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="what to load; may be repeated (default: every backend)",
    )
    command.add_argument(
        "--launcher",
        action="append",
        metavar="NAME",
        help="look at this launcher instead, and say what it lacks here; may be repeated",
    )
    command.add_argument(
        "--launcher-option",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="with this option of the launcher; may be repeated",
    )


BACKENDS = Command(
    "backends",
    "list the backends",
    "Lists the backends, their collectives, and whether their packages are installed.\nLoads"
    " no framework; `isotrain doctor` really tries them.",
    """\
examples:
  isotrain backends
  isotrain backends --json""",
)
STRATEGIES = Command(
    "strategies",
    "list which strategy runs on which backend",
    "Says for every strategy and backend whether they fit, from what they declare.",
    """\
examples:
  isotrain strategies
  isotrain strategies --json""",
)
PLUGINS = Command(
    "plugins",
    "list the plugins",
    "Lists the plugins: what they registered, where they come from, and what is wrong with them.",
    """\
examples:
  isotrain plugins
  isotrain plugins digits.yaml                             also those that the spec names
  isotrain plugins --plugin my_strategy.py --json""",
    add_arguments=_add_plugins_arguments,
)
DOCTOR = Command(
    "doctor",
    "find out what works here, and why not",
    "Really loads backends, each in a process of its own, and says of it and of each of\n"
    "its collectives: usable or not, which version, why not, and what to do.",
    """\
examples:
  isotrain doctor
  isotrain doctor --backend horovod-torch
  isotrain doctor --launcher slurm
  isotrain doctor --launcher mpi --launcher-option hosts=node1:2,node2:2
  isotrain doctor --json > machine.json""",
    add_arguments=_add_doctor_arguments,
)
SCHEMA = Command(
    "schema",
    "print the JSON Schema of specs",
    "Prints the JSON Schema of spec files, with which editors complete and check them.",
    """\
examples:
  isotrain schema > isotrain.schema.json

then, as the first line of a YAML spec, for editors:
  # yaml-language-server: $schema=isotrain.schema.json""",
)
