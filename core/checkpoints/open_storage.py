"""From the location that a person names to the storage that is there."""

from __future__ import annotations

import os

from isotrain.core.checkpoints.local_storage import LocalStorage
from isotrain.core.checkpoints.storage import Storage
from isotrain.core.system.files import is_url

CHECKPOINTS_FOLDER = "checkpoints"
"""The folder of a run's checkpoints, unless its spec names another."""


def storage_at(location: str | os.PathLike[str]) -> Storage:
    """The folder at a local path or an fsspec URL; it need not be there yet.

    Raises:
        CheckpointError: Nothing that is installed can open such a URL.
    """
    text = os.fspath(location)
    if not is_url(text) or text.startswith("file://"):
        return LocalStorage(text.removeprefix("file://"))
    from isotrain.core.checkpoints.fsspec_storage import FsspecStorage

    return FsspecStorage(text)
