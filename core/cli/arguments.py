"""The commands of the command line and their arguments, with the texts of `--help`."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_parser import Layout, Parser
from isotrain.core.cli.argument_types import (
    option,
    several,
    target,
)
from isotrain.core.cli.checkpoint_arguments import (
    ACTION_EXAMPLES,
    ACTIONS,
    describe_action,
)
from isotrain.core.cli.checkpoint_arguments import DESCRIPTIONS as OF_CHECKPOINTS
from isotrain.core.cli.checkpoint_arguments import EXAMPLES as CHECKPOINT_EXAMPLES
from isotrain.core.cli.compare_arguments import describe_compare, describe_report
from isotrain.core.cli.config_arguments import CONFIG_EXAMPLES, describe_config
from isotrain.core.cli.config_arguments import DESCRIPTIONS as OF_CONFIG
from isotrain.core.cli.finding_arguments import (
    CHECK_EXAMPLES,
    PARITY_EXAMPLES,
    describe_check,
    describe_parity,
)
from isotrain.core.cli.finding_arguments import DESCRIPTIONS as OF_FINDINGS
from isotrain.core.cli.launching_arguments import DESCRIPTIONS as OF_LAUNCHING
from isotrain.core.cli.launching_arguments import LAUNCHERS_EXAMPLES, PLACE_EXAMPLES
from isotrain.core.cli.model_arguments import DESCRIPTIONS as OF_MODELS
from isotrain.core.cli.model_arguments import (
    EXPORT_EXAMPLES,
    PREDICT_EXAMPLES,
    describe_export,
    describe_predict,
)
from isotrain.core.cli.record_arguments import DESCRIPTIONS as OF_RECORDS
from isotrain.core.cli.record_arguments import (
    LOGS_EXAMPLES,
    RUNS_EXAMPLES,
    describe_logs,
    describe_runs,
)
from isotrain.core.cli.run_arguments import DESCRIPTIONS as OF_RUNS
from isotrain.core.cli.run_arguments import (
    RESUME_EXAMPLES,
    RUN_EXAMPLES,
    describe_resume,
    describe_run,
)
from isotrain.core.cli.spec_arguments import describe_spec, describe_target
from isotrain.core.system.version import VERSION

_MAIN_EXAMPLES = """\
examples:
  isotrain doctor                                          what works on this machine, and why not
  isotrain plan digits.yaml --backend torch-ddp --replicas 2
  isotrain check digits.yaml --backend torch-ddp --replicas 1,2
  isotrain run digits.yaml --backend torch-ddp --replicas 2

`isotrain COMMAND --help` explains a command."""
_PLAN_EXAMPLES = """\
examples:
  isotrain plan digits.yaml --backend torch-ddp --replicas 2
  isotrain plan digits.yaml --backend torch-ddp --replicas 8 --no-measure
  isotrain plan digits.yaml --diff torch-ddp@2 tf-multiworker:ring@2
  isotrain plan digits.yaml --diff torch-ddp@2 'torch-ddp@2 local-sgd,every=8'"""
_COMPARE_EXAMPLES = """\
examples:
  isotrain compare digits.yaml --backend torch-ddp --backend tf-mirrored --replicas 1,2
  isotrain compare digits.yaml --replicas 1,2 --time-budget 10m --output today
  isotrain compare digits.yaml --replicas 1,2 --time-budget 10m --output today --resume
  isotrain compare digits.yaml --backend torch-ddp --against before --fail-if-slower 5%
  isotrain compare digits.yaml --backend torch-ddp --backend tf-multiworker:ring \\
      --python tf-multiworker=/home/me/tensorflow/bin/python"""
_REPORT_EXAMPLES = """\
examples:
  isotrain report comparisons/digits-20260102-030405
  isotrain report today --json"""
_BACKENDS_EXAMPLES = """\
examples:
  isotrain backends
  isotrain backends --json"""
_STRATEGIES_EXAMPLES = """\
examples:
  isotrain strategies
  isotrain strategies --json"""
_PLUGINS_EXAMPLES = """\
examples:
  isotrain plugins
  isotrain plugins digits.yaml                             also those that the spec names
  isotrain plugins --plugin my_strategy.py --json"""
_DOCTOR_EXAMPLES = """\
examples:
  isotrain doctor
  isotrain doctor --backend horovod-torch
  isotrain doctor --launcher slurm
  isotrain doctor --launcher mpi --launcher-option hosts=node1:2,node2:2
  isotrain doctor --json > machine.json"""
_CONFORMANCE_EXAMPLES = """\
examples:
  isotrain conformance my-backend
  isotrain conformance my-backend:gloo --replicas 3
  isotrain conformance my-strategy --backend torch-ddp
  isotrain conformance my-strategy --json > card.json"""
_NEW_PLUGIN_EXAMPLES = """\
examples:
  isotrain new-plugin elastic-averaging
  isotrain new-plugin elastic-averaging --directory ~/work"""
_SCHEMA_EXAMPLES = """\
examples:
  isotrain schema > isotrain.schema.json

then, as the first line of a YAML spec, for editors:
  # yaml-language-server: $schema=isotrain.schema.json"""


def parser() -> argparse.ArgumentParser:
    """Describes every command and its arguments."""
    top = Parser(
        prog="isotrain",
        description="Trains one spec under any data-parallel backend, with the same result.",
        epilog=_MAIN_EXAMPLES,
        formatter_class=Layout,
    )
    top.add_argument("--version", action="version", version=f"isotrain {VERSION}")
    commands = top.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    describe_run(_add(commands, "run", "train a spec under a backend", RUN_EXAMPLES))
    describe_resume(_add(commands, "resume", "go on with a run", RESUME_EXAMPLES))
    _describe_plan(_add(commands, "plan", "show what a run would do", _PLAN_EXAMPLES))
    _describe_compare(_add(commands, "compare", "measure backends side by side", _COMPARE_EXAMPLES))
    describe_report(_add(commands, "report", "show a comparison again", _REPORT_EXAMPLES))
    describe_check(_add(commands, "check", "warn of what makes results differ", CHECK_EXAMPLES))
    describe_parity(
        _add(commands, "parity", "find where two runs of a spec part, and why", PARITY_EXAMPLES)
    )
    describe_predict(
        _add(
            commands,
            "predict",
            "predict with the model of a finished run",
            PREDICT_EXAMPLES,
            home="isotrain.core.cli.model_commands",
        )
    )
    _add_checkpoint(commands)
    describe_export(
        _add(
            commands,
            "export",
            "write the model of a finished run for others",
            EXPORT_EXAMPLES,
            home="isotrain.core.cli.model_commands",
        )
    )
    _add(commands, "backends", "list the backends", _BACKENDS_EXAMPLES)
    _add(commands, "strategies", "list which strategy runs on which backend", _STRATEGIES_EXAMPLES)
    _add_records(commands)
    describe_config(
        _add(
            commands,
            "config",
            "write a script that launches a training",
            CONFIG_EXAMPLES,
            home="isotrain.core.cli.config_command",
        )
    )
    for name, summary, examples in (
        ("launchers", "list what starts which backend", LAUNCHERS_EXAMPLES),
        ("place", "say which process of which engine this one is", PLACE_EXAMPLES),
    ):
        _add(commands, name, summary, examples, home="isotrain.core.cli.launching_commands")
    _describe_plugins(_add(commands, "plugins", "list the plugins", _PLUGINS_EXAMPLES))
    _describe_doctor(
        _add(commands, "doctor", "find out what works here, and why not", _DOCTOR_EXAMPLES)
    )
    _describe_conformance(
        _add(
            commands,
            "conformance",
            "check whether a backend or a strategy keeps the promises",
            _CONFORMANCE_EXAMPLES,
            home="isotrain.testing.commands",
        )
    )
    _describe_new_plugin(
        _add(commands, "new-plugin", "make a package with a strategy", _NEW_PLUGIN_EXAMPLES)
    )
    _add(commands, "schema", "print the JSON Schema of specs", _SCHEMA_EXAMPLES)
    top.commands = commands.choices
    return top


_DESCRIPTIONS = OF_MODELS | {
    **OF_RUNS,
    **OF_FINDINGS,
    **OF_CHECKPOINTS,
    **OF_LAUNCHING,
    **OF_CONFIG,
    **OF_RECORDS,
    "plan": "Resolves a run without training: who runs where, the collective that will really be used,\n"
    "batches, learning rate, environment, exchanged bytes. With --diff, compares two of them.",
    "compare": "Measures every backend with every number of replicas, in new processes, in turn and\n"
    "several times, and says which is fastest, or that it cannot tell. docs/compare.md explains all.",
    "report": "Makes the report of a comparison again from its stored results, and prints its tables.",
    "backends": "Lists the backends, their collectives, and whether their packages are installed.\nLoads"
    " no framework; `isotrain doctor` really tries them.",
    "strategies": "Says for every strategy and backend whether they fit, from what they declare.",
    "plugins": "Lists the plugins: what they registered, where they come from, and what is wrong with them.",
    "doctor": "Really loads backends, each in a process of its own, and says of it and of each of\n"
    "its collectives: usable or not, which version, why not, and what to do.",
    "conformance": "Runs the conformance checks of a backend or a strategy and prints a scorecard: passed,"
    "\nfailed and why, or not asked and why. Ends with exit code 4 when a check fails.",
    "new-plugin": "Makes a package that can be installed: a strategy, its entry point, tests with the\n"
    "conformance kit, a README. Its tests pass at once.",
    "schema": "Prints the JSON Schema of spec files, with which editors complete and check them.",
}


def _add(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    summary: str,
    examples: str,
    home: str = "isotrain.core.cli.commands",
) -> argparse.ArgumentParser:
    """Adds a command; the module `home` has the function that does it."""
    command = commands.add_parser(
        name,
        help=summary,
        description=_DESCRIPTIONS[name],
        epilog=examples,
        formatter_class=Layout,
    )
    everywhere = command.add_argument_group("options of every command")
    everywhere.add_argument("--json", action="store_true", help="print JSON instead of text")
    everywhere.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="also load this plugin: a module, or a file that ends in .py; may be repeated",
    )
    everywhere.add_argument(
        "--block-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="leave this plugin out; `isotrain plugins` lists all; may be repeated",
    )
    command.set_defaults(home=home)
    return command


def _add_checkpoint(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command whose actions are commands of their own."""
    group = commands.add_parser(
        "checkpoint",
        help="show, compare, verify and prune checkpoints",
        description=_DESCRIPTIONS["checkpoint"],
        epilog=CHECKPOINT_EXAMPLES,
        formatter_class=Layout,
    )
    actions = group.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    for action, summary in ACTIONS.items():
        examples, home = ACTION_EXAMPLES[action], "isotrain.core.cli.checkpoint_commands"
        describe_action(action, _add(actions, action, summary, examples, home))
    group.commands = actions.choices


def _add_records(commands: argparse._SubParsersAction[Parser]) -> None:
    home = "isotrain.core.cli.record_commands"
    describe_runs(_add(commands, "runs", "list runs and how far they came", RUNS_EXAMPLES, home))
    describe_logs(_add(commands, "logs", "print what a rank has printed", LOGS_EXAMPLES, home))


def _describe_plugins(command: argparse.ArgumentParser) -> None:
    command.add_argument("spec", metavar="SPEC", nargs="?", help="also load what this spec names")


def _describe_plan(command: argparse.ArgumentParser) -> None:
    describe_spec(command)
    describe_target(command, required=False)
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


def _describe_compare(command: argparse.ArgumentParser) -> None:
    describe_spec(command)
    describe_compare(command)


def _describe_doctor(command: argparse.ArgumentParser) -> None:
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


def _describe_conformance(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "name", metavar="NAME", help="of a backend (NAME[:COLLECTIVE]) or of a strategy"
    )
    command.add_argument(
        "--backend",
        metavar="NAME[:COLLECTIVE]",
        help="check the strategy NAME on it (default: the first that has what the strategy requires)",
    )
    command.add_argument(
        "--replicas", type=several, default=2, metavar="N", help="how many, at least 2 (default: 2)"
    )


def _describe_new_plugin(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help="of the strategy: lower case, with hyphens")
    command.add_argument(
        "--directory",
        default=".",
        metavar="DIR",
        help="where to make the folder isotrain-NAME (default: here)",
    )
