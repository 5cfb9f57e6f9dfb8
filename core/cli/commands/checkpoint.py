"""The arguments of `isotrain checkpoint`, with the texts of its help."""

from __future__ import annotations

import argparse
import dataclasses

from isotrain.core.cli.argument_types import positive_int
from isotrain.core.cli.command import Command
from isotrain.core.cli.commands.model import EXPORT
from isotrain.core.cli.parser import HelpLayout, Parser

_EXAMPLES = """\
examples:
  isotrain checkpoint show runs/digits-20260102-030405
  isotrain checkpoint diff runs/one runs/two/checkpoints/step-000000100
  isotrain checkpoint verify runs/one s3://bucket/two
  isotrain checkpoint export runs/one --spec digits.yaml --output digits.keras
  isotrain checkpoint prune runs/one --keep-last 2

`isotrain checkpoint ACTION --help` explains an action."""
_DESCRIPTION = (
    "Shows, compares, checks, exports and removes checkpoints, which may lie behind a URL such as"
    " s3://bucket/run."
)
_PATHS = "a checkpoint; or a folder of checkpoints or a run directory"
_HOME = "isotrain.core.cli.commands.checkpoint_actions"


def add_checkpoint(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command whose actions are commands of their own."""
    group = commands.add_parser(
        "checkpoint",
        help="show, compare, verify, export and prune checkpoints",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=HelpLayout,
    )
    actions = group.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    for action in _ACTIONS:
        action.add_to(actions)
    group.commands = actions.choices


def _add_show_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", metavar="PATH", help=f"{_PATHS}: the newest in it")


def _add_diff_arguments(command: argparse.ArgumentParser) -> None:
    _add_show_arguments(command)
    command.add_argument("other", metavar="OTHER", help="another")


def _add_verify_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("paths", nargs="+", metavar="PATH", help=f"{_PATHS}: all in it")


def _add_prune_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="FOLDER", help=_PATHS.partition("; or ")[2])
    command.add_argument(
        "--keep-last",
        type=positive_int,
        required=True,
        metavar="N",
        help="how many stay, at least 1",
    )


_ACTIONS = (
    Command(
        "show",
        "show what is in a checkpoint",
        "Shows the step of a checkpoint, what it is of, and each tensor with its shape, dtype and bytes.",
        "examples:\n  isotrain checkpoint show runs/one/checkpoints/step-000000100 --json",
        add_arguments=_add_show_arguments,
        module=_HOME,
    ),
    Command(
        "diff",
        "show in which tensors two checkpoints differ",
        "Compares two checkpoints tensor by tensor: which differ and by how much, and which are only\n"
        "in one of them. Ends with exit code 6 when they differ.",
        "examples:\n  isotrain checkpoint diff runs/one runs/two",
        add_arguments=_add_diff_arguments,
        module=_HOME,
    ),
    Command(
        "verify",
        "read every byte of checkpoints",
        "Reads every byte of checkpoints and compares sizes and checksums with those written\n"
        "down then; of a folder, those of all in it. Ends with exit code 4 when one is damaged.",
        "examples:\n  isotrain checkpoint verify runs/one runs/two",
        add_arguments=_add_verify_arguments,
        module=_HOME,
    ),
    dataclasses.replace(
        EXPORT,
        summary="write the model of a checkpoint for others",
        description="Writes the model as a checkpoint has it (of a folder or a run, the newest) in a form\n"
        "that others open without isotrain. docs/in-and-out.md says who opens what.\nThe function that makes"
        " the model is that of --spec; without it only safetensors are written.",
        examples="examples:\n  isotrain checkpoint export runs/one --spec one.yaml --output one.keras",
        module=_HOME,
    ),
    Command(
        "prune",
        "remove old checkpoints",
        "Removes all complete checkpoints of a folder but the newest, and what is left of attempts to\n"
        "write one before these.",
        "examples:\n  isotrain checkpoint prune runs/one --keep-last 2",
        add_arguments=_add_prune_arguments,
        module=_HOME,
    ),
)
