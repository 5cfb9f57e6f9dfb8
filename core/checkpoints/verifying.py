"""Whether checkpoints are as they were written."""

from __future__ import annotations

import os
from collections.abc import Iterator

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.finding import folder_at, open_if_checkpoint
from isotrain.core.errors import CheckpointError


def verify_checkpoints(location: str | os.PathLike[str]) -> Iterator[tuple[str, str | None]]:
    """Reads every byte of a checkpoint, or of all in a folder or a run directory.

    Yields:
        Where each is; and what is wrong with it, or None.

    Raises:
        CheckpointError: There is none, sound or damaged.
    """
    try:
        found = open_if_checkpoint(location)
    except CheckpointError as error:
        yield os.fspath(location), str(error)
        return
    if found is not None:
        yield found.location, _fault(found)
        return
    folder = folder_at(location)
    damaged, complete = folder.damaged(), folder.complete()
    if not (damaged or complete):
        raise CheckpointError(f"{location}: there is no checkpoint.")
    for checkpoint in complete:
        yield checkpoint.location, _fault(checkpoint)
    for fault in damaged.values():
        yield folder.location, fault


def _fault(checkpoint: Checkpoint) -> str | None:
    try:
        checkpoint.verify()
    except CheckpointError as error:
        return str(error)
    return None
