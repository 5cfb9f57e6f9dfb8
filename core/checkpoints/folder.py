"""A folder of checkpoints: how they are written, found and removed."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from isotrain.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from isotrain.core.checkpoints.manifest import MANIFEST
from isotrain.core.checkpoints.open_storage import CHECKPOINTS_FOLDER, storage_at
from isotrain.core.checkpoints.tensor_part import Section
from isotrain.core.checkpoints.writer import CheckpointTransaction, folder_of
from isotrain.core.errors import CheckpointError

_STEP = re.compile(r"step-(\d{9,18})")


class CheckpointFolder:
    """A folder of checkpoints, at a local path or an fsspec URL; it need not be there yet.

    What makes a checkpoint is its manifest, which is written last. Until then, and at whichever moment
    somebody is stopped, those before are there as they were.

    Attributes:
        location: Its path or URL.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self._storage = storage_at(location)
        self.location = self._storage.location

    def complete(self) -> list[Checkpoint]:
        """The complete checkpoints, ascending by step; of each only the manifest is read.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        return [each for each in self._found().values() if isinstance(each, Checkpoint)]

    def newest(self) -> Checkpoint | None:
        """The complete checkpoint with the most steps; None if there is none.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        steps: list[int] | None = None
        with self._os_errors("read"):
            while steps != (steps := self._steps()):  # others may come while these are removed
                for step in reversed(steps):
                    found = self._look(step)
                    if isinstance(found, Checkpoint):
                        return found
        return None

    def damaged(self) -> dict[int, str]:
        """What is wrong with checkpoints that have a manifest and are not complete, by step.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        found = self._found().items()
        return {step: str(each) for step, each in found if isinstance(each, CheckpointError)}

    def save(
        self, step: int, *, sections: Mapping[str, Section], run: Mapping[str, Any]
    ) -> Checkpoint:
        """Writes a checkpoint of which this process has all: `write` and `commit` together."""
        token = secrets.token_hex(8)
        self.write(step, token=token, writer=0, sections=sections)
        return self.commit(step, token=token, writers=1, run=run, timeout_s=0.0)

    def write(self, step: int, *, token: str, writer: int, sections: Mapping[str, Section]) -> None:
        """Writes this process's share of a checkpoint: a file for each section. Any process and thread.

        Args:
            step: Steps that were done.
            token: What all writers of this checkpoint have in common with each other, and with no
                other attempt to save in this folder: letters, digits, `_`, `-` and `.`.
            writer: Which of them this is, from 0.
            sections: Their tensors, by name. They must not change until this returns.

        Raises:
            CheckpointError: It cannot be written. Nothing of it is left, where that was possible.
        """
        CheckpointTransaction(self._storage, step, token).write(writer, sections)

    def commit(
        self,
        step: int,
        *,
        token: str,
        writers: int,
        run: Mapping[str, Any],
        timeout_s: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> Checkpoint:
        """Makes a checkpoint of what all have written, in place of an earlier one of this step.

        One process calls it, after its own `write`.

        Args:
            step: As for `write`.
            token: As for `write`.
            writers: How many write.
            run: Where the run is, as JSON values; NaN and infinite numbers become texts.
            timeout_s: How long to wait for the others.
            given_up: Whether to wait no longer, as one of them has failed.

        Raises:
            CheckpointError: A writer did not come in time, or what was written makes no whole: then it
                is removed. Or it cannot be written.
        """
        return CheckpointTransaction(self._storage, step, token).commit(
            writers, run, timeout_s, given_up
        )

    def prune(self, *, keep_last: int, keep: Collection[int] = ()) -> list[int]:
        """Removes checkpoints, and what is left of attempts to write one before the newest complete one.

        Args:
            keep_last: How many of the complete ones stay, those with the most steps: at least 1.
            keep: Steps whose checkpoints stay besides.

        Returns:
            The steps of what was removed, ascending.

        Raises:
            CheckpointError: Something cannot be removed.
        """
        if keep_last < 1:
            raise CheckpointError(f"keep_last: expected at least 1, received {keep_last}.")
        found = self._found()
        whole = {step: each for step, each in found.items() if isinstance(each, Checkpoint)}
        stay = {*list(whole)[-keep_last:], *whole.keys() & set(keep)}
        past = [step for step in found if step < max(whole, default=0)]
        doomed = [step for step in past if step not in stay]
        with self._os_errors("pruned"):
            for step in doomed:
                self._storage.remove(folder_of(step), MANIFEST)
            for step in set(past) & stay:
                self._remove_attempts(whole[step])
            self._storage.remove_leftovers()
        return doomed

    def _remove_attempts(self, checkpoint: Checkpoint) -> None:
        """Removes what was written for the checkpoint of a step besides the one that is there."""
        folder = folder_of(checkpoint.step)
        for token in self._storage.folders(folder):
            if token != checkpoint.token:
                self._storage.remove(f"{folder}/{token}", MANIFEST)

    def _found(self) -> dict[int, Checkpoint | CheckpointError | None]:
        """Whatever has the name of a checkpoint, by step: None where there is no manifest."""
        with self._os_errors("read"):
            return {step: self._look(step) for step in self._steps()}

    def _steps(self) -> list[int]:
        """The steps in the names of folders, ascending."""
        names = self._storage.folders("")
        steps = [int(match[1]) for name in names if (match := _STEP.fullmatch(name))]
        return sorted(step for step in steps if folder_of(step) in names)

    def _look(self, step: int) -> Checkpoint | CheckpointError | None:
        folder = folder_of(step)
        try:
            found = open_checkpoint(self._storage, folder)
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            is_there = MANIFEST in self._storage.sizes(
                folder
            )  # or did somebody remove it just now?
            return error if is_there else None
        if found.step != step:
            return CheckpointError(f"{found.location} is the checkpoint of step {found.step}.")
        return found

    @contextmanager
    def _os_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.location} cannot be {what}: {error}") from error


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
