"""From the location that a person names to the storage that is there."""

from __future__ import annotations

import os
import re

from isotrain.core.checkpoints.local_storage import LocalStorage
from isotrain.core.checkpoints.storage import Storage

IN_RUN_DIRECTORY = "checkpoints"
"""The folder of a run's checkpoints, unless its spec names another."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def storage_at(location: str | os.PathLike[str]) -> Storage:
    """The folder at a local path or an fsspec URL; it need not be there yet.

    Raises:
        CheckpointError: Nothing that is installed can open such a URL.
    """
    text = os.fspath(location)
    if not _URL.match(text) or text.startswith("file://"):
        return LocalStorage(text.removeprefix("file://"))
    from isotrain.core.checkpoints.remote_storage import RemoteStorage

    return RemoteStorage(text)
