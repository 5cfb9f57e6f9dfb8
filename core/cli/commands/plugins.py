"""`isotrain conformance` and `isotrain new-plugin`: for authors of plugins."""

from __future__ import annotations

import argparse
from pathlib import Path

from isotrain.core.cli.argument_types import int_from_two
from isotrain.core.cli.command import Command
from isotrain.core.json_format import FORMAT, json_page


def new_plugin(options: argparse.Namespace) -> None:
    """Creates the package of a new plugin."""
    from isotrain.core.plugins.scaffold import make_plugin

    folder = make_plugin(options.name, Path(options.directory))
    if options.json:
        print(json_page({"format": FORMAT, "folder": str(folder)}))
        return
    print(f"{folder}: pip install --editable {folder}, then pytest {folder}")


def _add_conformance_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "name", metavar="NAME", help="name of a backend (NAME[:COLLECTIVE]) or of a strategy"
    )
    command.add_argument(
        "--backend",
        metavar="NAME[:COLLECTIVE]",
        help="backend to check the strategy on (default: the first that has what the strategy requires)",
    )
    command.add_argument(
        "--replicas",
        type=int_from_two,
        default=2,
        metavar="N",
        help="number of replicas, at least 2 (default: 2)",
    )


def _add_new_plugin_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "name", metavar="NAME", help="name of the strategy: lower case, with hyphens"
    )
    command.add_argument(
        "--directory",
        default=".",
        metavar="DIR",
        help="where to create the folder isotrain-NAME (default: here)",
    )


CONFORMANCE = Command(
    "conformance",
    "run the conformance checks of a backend or a strategy",
    "Runs the conformance checks of a backend or a strategy and prints a scorecard: passed,"
    "\nfailed and why, or skipped and why. Ends with exit code 4 when a check fails.",
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
    "create a package with a strategy",
    "Creates a package that can be installed: a strategy, its entry point, tests with the\n"
    "conformance kit, a README. Its tests pass as created.",
    """\
examples:
  isotrain new-plugin elastic-averaging
  isotrain new-plugin elastic-averaging --directory ~/work""",
    add_arguments=_add_new_plugin_arguments,
    module=__name__,
)
