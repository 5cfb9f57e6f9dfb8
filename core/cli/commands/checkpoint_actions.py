"""What `isotrain checkpoint` does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from isotrain.core.checkpoints.diff import diff_checkpoints
from isotrain.core.checkpoints.folder import checkpoint_at, folder_at
from isotrain.core.checkpoints.inspect import describe_checkpoint, verify_checkpoints
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.errors import CheckpointError
from isotrain.core.json_format import FORMAT, json_page


def checkpoint(options: argparse.Namespace) -> ExitCode | None:
    """Does what was asked for."""
    return _ACTIONS[options.action](options)


def _show(options: argparse.Namespace) -> None:
    found = describe_checkpoint(checkpoint_at(options.path))
    _print(found, options.json, "contents")


def _diff(options: argparse.Namespace) -> ExitCode:
    ends = [checkpoint_at(path) for path in (options.path, options.other)]
    found = diff_checkpoints(*ends)
    checkpoints = [{"location": end.location, "step": end.step} for end in ends]
    _print({"checkpoints": checkpoints, **found.to_dict()}, options.json, "differences")
    return ExitCode.OK if found.has_none else ExitCode.DIFFERENT


def _verify(options: argparse.Namespace) -> ExitCode:
    found = [each for path in options.paths for each in verify_checkpoints(path)]
    checkpoints = [
        {"location": location, "sound": fault is None, "fault": fault} for location, fault in found
    ]
    _print({"checkpoints": checkpoints}, options.json, "verified")
    return ExitCode.OK if all(each["sound"] for each in checkpoints) else ExitCode.FINDINGS


def _export(options: argparse.Namespace) -> None:
    from isotrain.core.cli.commands.model_actions import export

    options.run = checkpoint_at(options.run)
    export(options)


def _prune(options: argparse.Namespace) -> None:
    folder = folder_at(options.folder)
    if folder.newest() is None:
        raise CheckpointError(f"{folder.location}: there is no complete checkpoint.")
    removed = folder.prune(keep_last=options.keep_last)
    kept = [each.step for each in folder.complete()]
    found = {"folder": folder.location, "removed": removed, "kept": kept}
    _print(found, options.json, "pruned")


def _print(found: Mapping[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        print(json_page({"format": FORMAT, **found}))
        return
    from isotrain.core.reporting import checkpoint_text

    sys.stdout.write(getattr(checkpoint_text, text)(found))


_ACTIONS: Mapping[str, Callable[[argparse.Namespace], ExitCode | None]] = {
    "show": _show,
    "diff": _diff,
    "verify": _verify,
    "export": _export,
    "prune": _prune,
}
