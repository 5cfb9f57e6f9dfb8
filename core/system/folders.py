"""Folders that somebody has named."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from isotrain.core.errors import PlanError


def make_folder(folder: Path, what: str) -> Path:
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


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Should its body fail, takes a folder, and those above it, away again where there was none.

    One that something was put into meanwhile stays.
    """
    way = (folder, *folder.parents)
    missing = list(itertools.takewhile(lambda each: not each.exists(), way))
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for each in missing:
                each.rmdir()
        raise
