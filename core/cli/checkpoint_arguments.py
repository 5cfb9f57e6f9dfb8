"""The arguments of `isotrain checkpoint`, with the texts of its help."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import count

EXAMPLES = """\
examples:
  isotrain checkpoint show runs/digits-20260102-030405
  isotrain checkpoint diff runs/one runs/two/checkpoints/step-000000100
  isotrain checkpoint verify runs/one s3://bucket/two
  isotrain checkpoint prune runs/one --keep-last 2

`isotrain checkpoint ACTION --help` explains an action."""
ACTIONS = {
    "show": "show what is in a checkpoint",
    "diff": "show in which tensors two checkpoints differ",
    "verify": "read every byte of checkpoints",
    "prune": "remove old checkpoints",
}
"""What can be done, in a few words."""
DESCRIPTIONS = {
    "checkpoint": "Shows, compares, checks and removes checkpoints, which may lie behind a URL such as"
    " s3://bucket/run.",
    "show": "Shows the step of a checkpoint, what it is of, and each tensor with its shape, dtype and bytes.",
    "diff": "Compares two checkpoints tensor by tensor: which differ and by how much, and which are only\n"
    "in one of them. Ends with exit code 6 when they differ.",
    "verify": "Reads every byte of checkpoints and compares sizes and checksums with those written\n"
    "down then; of a folder, those of all in it. Ends with exit code 4 when one is damaged.",
    "prune": "Removes all complete checkpoints of a folder but the newest, and what is left of attempts to\n"
    "write one before these.",
}
ACTION_EXAMPLES = {
    "show": "examples:\n  isotrain checkpoint show runs/one/checkpoints/step-000000100 --json",
    "diff": "examples:\n  isotrain checkpoint diff runs/one runs/two",
    "verify": "examples:\n  isotrain checkpoint verify runs/one runs/two",
    "prune": "examples:\n  isotrain checkpoint prune runs/one --keep-last 2",
}


def describe_action(action: str, command: argparse.ArgumentParser) -> None:
    """Adds what an action takes."""
    paths = "a checkpoint; or a folder of checkpoints or a run directory"
    if action == "prune":
        command.add_argument("folder", metavar="FOLDER", help=paths.partition("; or ")[2])
        command.add_argument(
            "--keep-last", type=count, required=True, metavar="N", help="how many stay, at least 1"
        )
    elif action == "verify":
        command.add_argument("paths", nargs="+", metavar="PATH", help=f"{paths}: all in it")
    else:
        command.add_argument("path", metavar="PATH", help=f"{paths}: the newest in it")
        if action == "diff":
            command.add_argument("other", metavar="OTHER", help="another")
