"""Arguments of the commands for people who write plugins, with the texts of their `--help`."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import int_from_two
from isotrain.core.cli.command import Command


def _add_conformance_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "name", metavar="NAME", help="of a backend (NAME[:COLLECTIVE]) or of a strategy"
    )
    command.add_argument(
        "--backend",
        metavar="NAME[:COLLECTIVE]",
        help="check the strategy NAME on it (default: the first that has what the strategy requires)",
    )
    command.add_argument(
        "--replicas",
        type=int_from_two,
        default=2,
        metavar="N",
        help="how many, at least 2 (default: 2)",
    )


def _add_new_plugin_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help="of the strategy: lower case, with hyphens")
    command.add_argument(
        "--directory",
        default=".",
        metavar="DIR",
        help="where to make the folder isotrain-NAME (default: here)",
    )


CONFORMANCE = Command(
    "conformance",
    "check whether a backend or a strategy keeps the promises",
    "Runs the conformance checks of a backend or a strategy and prints a scorecard: passed,"
    "\nfailed and why, or not asked and why. Ends with exit code 4 when a check fails.",
    """\
examples:
  isotrain conformance my-backend
  isotrain conformance my-backend:gloo --replicas 3
  isotrain conformance my-strategy --backend torch-ddp
  isotrain conformance my-strategy --json > card.json""",
    add_arguments=_add_conformance_arguments,
    module="isotrain.testing.commands",
)
NEW_PLUGIN = Command(
    "new-plugin",
    "make a package with a strategy",
    "Makes a package that can be installed: a strategy, its entry point, tests with the\n"
    "conformance kit, a README. Its tests pass at once.",
    """\
examples:
  isotrain new-plugin elastic-averaging
  isotrain new-plugin elastic-averaging --directory ~/work""",
    add_arguments=_add_new_plugin_arguments,
)
