"""Opens the storage of a path or URL."""

from __future__ import annotations

import os

from isotrain.core.checkpoints.local_storage import LocalStorage
from isotrain.core.checkpoints.storage import Storage
from isotrain.core.system.files import is_url

CHECKPOINTS_FOLDER = "checkpoints"
"""Name of the folder of checkpoints in a run directory, unless the spec names another."""


def storage_at(location: str | os.PathLike[str]) -> Storage:
    """The storage at a local path or an fsspec URL; the folder need not exist yet.

    Raises:
        CheckpointError: No installed fsspec filesystem opens such a URL.
    """
    text = os.fspath(location)
    if not is_url(text) or text.startswith("file://"):
        return LocalStorage(text.removeprefix("file://"))
    from isotrain.core.checkpoints.fsspec_storage import FsspecStorage

    return FsspecStorage(text)
