"""The argument parser of the command line: every command, in the order of `--help`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isotrain.core.cli.command import Command
from isotrain.core.cli.commands.checkpoint import add_checkpoint
from isotrain.core.cli.commands.compare import COMPARE, REPORT
from isotrain.core.cli.commands.completion import COMPLETION
from isotrain.core.cli.commands.diagnose import CHECK, PARITY, TRACE
from isotrain.core.cli.commands.find import FIND
from isotrain.core.cli.commands.init import INIT
from isotrain.core.cli.commands.launchers import CLUSTER_INFO, LAUNCHERS
from isotrain.core.cli.commands.list import BACKENDS, DOCTOR, PLUGINS, SCHEMA, STRATEGIES
from isotrain.core.cli.commands.model import EVALUATE, EXPORT, PREDICT
from isotrain.core.cli.commands.plugins import CONFORMANCE, NEW_PLUGIN
from isotrain.core.cli.commands.run import PLAN, RESUME, RUN
from isotrain.core.cli.commands.runs import JOIN, LOGS, RUNS
from isotrain.core.cli.parser import HelpLayout, Parser
from isotrain.core.system.version import VERSION

_EXAMPLES = """\
examples:
  isotrain init spirals                        a spec, a model and data
  isotrain run train.yaml --replicas 2         train it
  isotrain check train.yaml --replicas 1,2     what could make results differ
  isotrain compare train.yaml --replicas 1,2   which backend is fastest here

`isotrain COMMAND --help` explains a command."""
_CHECKPOINT = "checkpoint", "show, compare, verify, export and prune checkpoints", add_checkpoint
_GROUPS: Mapping[str, Sequence[Command | tuple[str, str, Callable[[Any], None]]]] = {
    "train": (INIT, RUN, RESUME, JOIN, PLAN),
    "check and compare": (CHECK, COMPARE, REPORT, PARITY, TRACE, FIND),
    "use what was trained": (PREDICT, EVALUATE, EXPORT, _CHECKPOINT),
    "look at runs and this machine": (
        *(RUNS, LOGS, BACKENDS, STRATEGIES, LAUNCHERS, DOCTOR, CLUSTER_INFO, PLUGINS),
        *(SCHEMA, COMPLETION),
    ),
    "write a backend or a strategy": (NEW_PLUGIN, CONFORMANCE),
}
"""Commands by the heading of their group in `--help`; each by its name, summary and what adds it."""


def parser() -> Parser:
    """The parser of all commands and their arguments."""
    groups = {
        heading: [
            each if isinstance(each, tuple) else (each.name, each.summary, each.add_to)
            for each in commands
        ]
        for heading, commands in _GROUPS.items()
    }
    listed = (
        "\n".join([f"{heading}:", *(f"  {name:14}{summary}" for name, summary, _ in commands)])
        for heading, commands in groups.items()
    )
    top = Parser(
        prog="isotrain",
        usage="isotrain COMMAND ...",
        description="Trains one spec under any data-parallel backend, with the same result.\n\n"
        + "\n\n".join(listed),
        epilog=_EXAMPLES,
        formatter_class=HelpLayout,
    )
    top.add_argument("--version", action="version", version=f"isotrain {VERSION}")
    added = top.add_subparsers(
        prog="isotrain", dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for commands in groups.values():
        for _, _, add in commands:
            add(added)
    top.commands = added.choices
    top.set_defaults(program=top)
    return top
