"""Folders that somebody has named."""

from __future__ import annotations

from pathlib import Path

from isotrain.core.errors import PlanError


def made_folder(folder: Path, what: str) -> Path:
    """Makes a folder where there is none yet.

    Args:
        folder: To be there.
        what: Begins the message of the error: the folder as the person knows it.

    Raises:
        PlanError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"{what} cannot be made: {error}.") from error
    return folder
