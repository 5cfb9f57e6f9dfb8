"""The argument parser of the command line: every command, in the order of `--help`."""

from __future__ import annotations

import argparse

from isotrain.core.cli.commands.checkpoint import add_checkpoint
from isotrain.core.cli.commands.compare import COMPARE, REPORT
from isotrain.core.cli.commands.diagnose import CHECK, PARITY
from isotrain.core.cli.commands.find import FIND
from isotrain.core.cli.commands.init import INIT
from isotrain.core.cli.commands.launchers import CLUSTER_INFO, LAUNCHERS
from isotrain.core.cli.commands.list import BACKENDS, DOCTOR, PLUGINS, SCHEMA, STRATEGIES
from isotrain.core.cli.commands.model import EVALUATE, EXPORT, PREDICT
from isotrain.core.cli.commands.plugins import CONFORMANCE, NEW_PLUGIN
from isotrain.core.cli.commands.run import PLAN, RESUME, RUN
from isotrain.core.cli.commands.runs import LOGS, RUNS
from isotrain.core.cli.parser import HelpLayout, Parser
from isotrain.core.system.version import VERSION

_EXAMPLES = """\
examples:
  isotrain doctor                                          find out what works on this machine
  isotrain plan digits.yaml --backend torch-ddp --replicas 2
  isotrain check digits.yaml --backend torch-ddp --replicas 1,2
  isotrain run digits.yaml --backend torch-ddp --replicas 2

`isotrain COMMAND --help` explains a command."""
_COMMANDS = (
    INIT.add_to,
    RUN.add_to,
    RESUME.add_to,
    PLAN.add_to,
    COMPARE.add_to,
    REPORT.add_to,
    CHECK.add_to,
    PARITY.add_to,
    FIND.add_to,
    PREDICT.add_to,
    EVALUATE.add_to,
    add_checkpoint,
    EXPORT.add_to,
    BACKENDS.add_to,
    STRATEGIES.add_to,
    RUNS.add_to,
    LOGS.add_to,
    LAUNCHERS.add_to,
    CLUSTER_INFO.add_to,
    PLUGINS.add_to,
    DOCTOR.add_to,
    CONFORMANCE.add_to,
    NEW_PLUGIN.add_to,
    SCHEMA.add_to,
)
"""The functions that add the commands."""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands and their arguments."""
    top = Parser(
        prog="isotrain",
        description="Trains one spec under any data-parallel backend, with the same result.",
        epilog=_EXAMPLES,
        formatter_class=HelpLayout,
    )
    top.add_argument("--version", action="version", version=f"isotrain {VERSION}")
    commands = top.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for add in _COMMANDS:
        add(commands)
    top.commands = commands.choices
    return top
