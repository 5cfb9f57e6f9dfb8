"""Which checkpoints a person means by a path or URL."""

from __future__ import annotations

import os

from isotrain.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.locations import CHECKPOINTS_FOLDER, storage_at
from isotrain.core.errors import CheckpointError


def checkpoint_at(location: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at a path or URL; of a folder of checkpoints or a run directory, the newest.

    Raises:
        CheckpointError: There is none, or it is incomplete or damaged.
    """
    found = open_if_checkpoint(location)
    if found is None:
        folder = folder_at(location)
        found = folder.newest()
        if found is None:
            damaged = "".join(f" {fault}" for fault in folder.damaged().values())
            raise CheckpointError(
                f"{location}: there is no complete checkpoint, nor a folder or a run directory with"
                f" one.{damaged}"
            )
    return found


def folder_at(location: str | os.PathLike[str]) -> CheckpointFolder:
    """The folder of checkpoints at a path or URL, which may be that of a run directory."""
    inner = f"{os.fspath(location).rstrip('/')}/{CHECKPOINTS_FOLDER}"
    is_run = CHECKPOINTS_FOLDER in storage_at(location).folders("")
    return CheckpointFolder(inner if is_run else location)


def open_if_checkpoint(location: str | os.PathLike[str]) -> Checkpoint | None:
    """The checkpoint whose own folder it is; None: it is none.

    Raises:
        CheckpointError: It is incomplete or damaged.
    """
    storage = storage_at(location)
    try:
        return open_checkpoint(storage, "")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{location} cannot be read: {error}") from error
