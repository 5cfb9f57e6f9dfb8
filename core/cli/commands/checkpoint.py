"""`isotrain checkpoint`: its actions show, diff, verify, export and prune."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from isotrain.core.cli.argument_types import positive_int, run_location
from isotrain.core.cli.command import Command
from isotrain.core.cli.commands import model
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.parser import HelpLayout, Parser
from isotrain.core.errors import CheckpointError
from isotrain.core.json_format import FORMAT, json_page

_EXAMPLES = """\
examples:
  isotrain checkpoint show runs/digits-20260102-030405
  isotrain checkpoint diff runs/one runs/two/checkpoints/step-000000100
  isotrain checkpoint verify runs/one s3://bucket/two
  isotrain checkpoint export runs/one --spec digits.yaml --output digits.keras
  isotrain checkpoint prune runs/one --keep-last 2

`isotrain checkpoint ACTION --help` explains an action."""
_DESCRIPTION = (
    "Shows, compares, verifies, exports and removes checkpoints: local ones, or those at a URL such as"
    " s3://bucket/run."
)
_PATHS = "a checkpoint; or a folder of checkpoints or a run: its directory or name, or `last`"
"""Help of a path; only the text after `; or ` fits where a single checkpoint will not do."""


def checkpoint(options: argparse.Namespace) -> ExitCode | None:
    """Runs the chosen action."""
    return _FUNCTIONS[options.action](options)


def _show(options: argparse.Namespace) -> None:
    from isotrain.core.checkpoints.folder import checkpoint_at
    from isotrain.core.checkpoints.inspect import describe_checkpoint

    _print(describe_checkpoint(checkpoint_at(options.run)), options.json, "contents")


def _diff(options: argparse.Namespace) -> ExitCode:
    from isotrain.core.checkpoints.diff import diff_checkpoints
    from isotrain.core.checkpoints.folder import checkpoint_at

    first, second = (checkpoint_at(path) for path in (options.run, options.other))
    diff = diff_checkpoints(first, second)
    checkpoints = [{"location": side.location, "step": side.step} for side in (first, second)]
    _print({"checkpoints": checkpoints, **diff.to_dict()}, options.json, "differences")
    return ExitCode.OK if diff.is_empty else ExitCode.DIFFERENT


def _verify(options: argparse.Namespace) -> ExitCode:
    from isotrain.core.checkpoints.inspect import verify_checkpoints

    checkpoints = [
        {"location": location, "sound": fault is None, "fault": fault}
        for path in options.runs
        for location, fault in verify_checkpoints(path)
    ]
    _print({"checkpoints": checkpoints}, options.json, "verified")
    return ExitCode.OK if all(each["sound"] for each in checkpoints) else ExitCode.FINDINGS


def _export(options: argparse.Namespace) -> None:
    from isotrain.core.checkpoints.folder import checkpoint_at

    options.run = checkpoint_at(options.run)
    model.export(options)


def _prune(options: argparse.Namespace) -> None:
    from isotrain.core.checkpoints.folder import folder_at

    folder = folder_at(options.run)
    if folder.newest() is None:
        raise CheckpointError(f"{folder.location}: there is no complete checkpoint.")
    removed = folder.prune(keep_last=options.keep_last)
    kept = [checkpoint.step for checkpoint in folder.complete()]
    _print({"folder": folder.location, "removed": removed, "kept": kept}, options.json, "pruned")


def _print(report: Mapping[str, Any], as_json: bool, formatter: str) -> None:
    """Prints a report as JSON, or as text by a function of `checkpoint_text`."""
    if as_json:
        print(json_page({"format": FORMAT, **report}))
        return
    from isotrain.core.reporting import checkpoint_text

    sys.stdout.write(getattr(checkpoint_text, formatter)(report))


_FUNCTIONS: Mapping[str, Callable[[argparse.Namespace], ExitCode | None]] = {
    "show": _show,
    "diff": _diff,
    "verify": _verify,
    "export": _export,
    "prune": _prune,
}


def add_checkpoint(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds `checkpoint` and its actions, each a subcommand with its own `--help`."""
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
    command.add_argument(
        "run", type=run_location, metavar="RUN", help=f"{_PATHS}: the newest in it"
    )


def _add_diff_arguments(command: argparse.ArgumentParser) -> None:
    _add_show_arguments(command)
    command.add_argument("other", type=run_location, metavar="RUN", help="what to compare it with")


def _add_verify_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "runs", type=run_location, nargs="+", metavar="RUN", help=f"{_PATHS}: all in it"
    )


def _add_prune_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", type=run_location, metavar="RUN", help=_PATHS.partition("; or ")[2])
    command.add_argument(
        "--keep-last",
        type=positive_int,
        required=True,
        metavar="N",
        help="number of newest checkpoints to keep, at least 1",
    )


_ACTIONS = (
    Command(
        "show",
        "show what is in a checkpoint",
        "Shows the step of a checkpoint, its run, and the shape, dtype and bytes of each tensor.",
        "examples:\n  isotrain checkpoint show runs/one/checkpoints/step-000000100 --json",
        add_arguments=_add_show_arguments,
        module=__name__,
    ),
    Command(
        "diff",
        "show in which tensors two checkpoints differ",
        "Compares two checkpoints tensor by tensor: which differ and by how much, and which are only\n"
        "in one of them. Ends with exit code 6 when they differ.",
        "examples:\n  isotrain checkpoint diff runs/one runs/two",
        add_arguments=_add_diff_arguments,
        module=__name__,
    ),
    Command(
        "verify",
        "read every byte of checkpoints",
        "Reads every byte of checkpoints and compares sizes and checksums with those in their\n"
        "manifests; of a folder, of all checkpoints in it. Ends with exit code 4 when one is damaged.",
        "examples:\n  isotrain checkpoint verify runs/one runs/two",
        add_arguments=_add_verify_arguments,
        module=__name__,
    ),
    dataclasses.replace(
        model.EXPORT,
        summary="export the model of a checkpoint",
        description="Exports the model of a checkpoint (of a folder or a run: the newest) to a format that\n"
        "opens without isotrain. docs/models.md lists which program opens which format.\nThe function"
        " that makes the model is that of --spec; without it only safetensors are written.",
        examples="examples:\n  isotrain checkpoint export runs/one --spec one.yaml --output one.keras",
        module=__name__,
    ),
    Command(
        "prune",
        "remove old checkpoints",
        "Removes all complete checkpoints of a folder but the newest, and incomplete ones that are\n"
        "older than these.",
        "examples:\n  isotrain checkpoint prune runs/one --keep-last 2",
        add_arguments=_add_prune_arguments,
        module=__name__,
    ),
)
