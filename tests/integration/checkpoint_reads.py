"""What a process reads of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest import mock

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.contracts.state import ALL_STATE
from isotrain.core.session.session import Session


def restore_own(session: Session, folder: Path) -> None:
    """Restores a session, and sees that it reads nothing which only other processes hold."""
    names: set[str] = set()
    read, read_part = Checkpoint.read, Checkpoint.read_part

    def reading(of: Checkpoint, section: str, wanted: Collection[str] | None = None) -> Any:
        found = read(of, section, wanted)
        names.update(found if section == "state" else ())
        return found

    def reading_part(of: Checkpoint, section: str, name: str, *place: Any) -> Any:
        names.add(name)
        return read_part(of, section, name, *place)

    with (
        mock.patch.object(Checkpoint, "read", reading),
        mock.patch.object(Checkpoint, "read_part", reading_part),
    ):
        session.restore(folder)
    in_vain = names - set(session.group.describe_state(ALL_STATE))
    assert names, "it read nothing"
    assert not in_vain, f"read, and not held here: {in_vain}"
