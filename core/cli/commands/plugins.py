"""`isotrain conformance` and `isotrain new-plugin`: for authors of plugins."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import int_from_two, name_with_options
from isotrain.core.cli.command import Command
from isotrain.core.json_format import FORMAT, json_page


def new_plugin(options: argparse.Namespace) -> None:
    """Creates the package of a new plugin."""
    from isotrain.core.plugins.scaffold import make_plugin

    folder = make_plugin(options.name, options.output, options.kind)
    if options.json:
        print(json_page({"format": FORMAT, "kind": options.kind, "folder": str(folder)}))
        return
    print(f"{folder}: pip install --editable {folder}, then pytest {folder}")


def _add_conformance_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "checked",
        type=name_with_options,
        metavar="NAME[,OPTION=VALUE...]",
        help="a backend, NAME[:COLLECTIVE]; or a strategy, such as compressed,method=fp16",
    )
    command.add_argument(
        "-b",
        "--backend",
        metavar="NAME[:COLLECTIVE]",
        help="backend to check the strategy on (default: the first that has what the strategy requires)",
    )
    command.add_argument(
        "-n",
        "--replicas",
        type=int_from_two,
        default=2,
        metavar="N",
        help="number of replicas, at least 2 (default: 2)",
    )
    command.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="device of the checked runs; with gpu and a collective of CPUs, several replicas"
        " may share one GPU (default: auto)",
    )


def _add_new_plugin_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "name", metavar="NAME", help="name of the plugin: lower case, with hyphens"
    )
    command.add_argument(
        "--kind",
        default="strategy",
        metavar="KIND",
        help="what the plugin adds: strategy, backend, launcher or logger (default: strategy)",
    )
    command.add_argument(
        "--output",
        metavar="DIR",
        help="folder to create (default: isotrain-NAME)",
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
  isotrain conformance my-strategy,every=4 --backend {backend}
  isotrain conformance my-strategy --json > card.json""",
    add_arguments=_add_conformance_arguments,
    module="isotrain.testing.commands",
)
NEW_PLUGIN = Command(
    "new-plugin",
    "create a package with a strategy, backend, launcher or logger",
    "Creates a package that can be installed: a small plugin of the kind, its entry point,\n"
    "tests, a README. Its tests pass as created.",
    """\
examples:
  isotrain new-plugin elastic-averaging
  isotrain new-plugin my-cluster --kind launcher --output ~/my-cluster""",
    add_arguments=_add_new_plugin_arguments,
    module=__name__,
)
