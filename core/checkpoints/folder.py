"""A folder of checkpoints: writing, finding and pruning them."""

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
    """A folder of checkpoints, at a local path or an fsspec URL; it need not exist yet.

    A checkpoint exists once its manifest does, which is written last and atomically. An interruption at any
    moment leaves earlier checkpoints untouched.

    Attributes:
        location: Path or URL of the folder.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self._storage = storage_at(location)
        self.location = self._storage.location

    def complete(self) -> list[Checkpoint]:
        """The complete checkpoints, ascending by step; reads only their manifests.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        return [each for each in self._open_all().values() if isinstance(each, Checkpoint)]

    def newest(self) -> Checkpoint | None:
        """The complete checkpoint with the highest step; None if there is none.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        steps: list[int] | None = None
        with self._os_errors("read"):
            while steps != (steps := self._steps()):  # others may come while these are removed
                for step in reversed(steps):
                    checkpoint = self._open(step)
                    if isinstance(checkpoint, Checkpoint):
                        return checkpoint
        return None

    def damaged(self) -> dict[int, str]:
        """Error texts of the checkpoints that have a manifest but are not complete, by step.

        Raises:
            CheckpointError: The folder cannot be read.
        """
        results = self._open_all().items()
        return {step: str(each) for step, each in results if isinstance(each, CheckpointError)}

    def save(
        self, step: int, *, sections: Mapping[str, Section], run: Mapping[str, Any]
    ) -> Checkpoint:
        """Writes a checkpoint with a single writer: `write` and `commit` together."""
        token = secrets.token_hex(8)
        self.write(step, token=token, writer=0, sections=sections)
        return self.commit(step, token=token, writers=1, run=run, timeout_s=0.0)

    def write(self, step: int, *, token: str, writer: int, sections: Mapping[str, Section]) -> None:
        """Writes this writer's part of a checkpoint: one file per section. Local; any thread may call it.

        Args:
            step: Number of steps done.
            token: Unique token of this attempt to save, the same for all its writers: letters, digits, `_`,
                `-` and `.`.
            writer: Index of this writer, from 0.
            sections: Tensors of each section, by name. They must not change until this returns.

        Raises:
            CheckpointError: A file cannot be written. Files of this writer are removed if possible.
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
        """Commits the files of all writers as a checkpoint, in place of an earlier one of this step.

        Local: one process calls it, after its own `write`.

        Args:
            step: Number of steps done.
            token: Token of this attempt.
            writers: Number of writers.
            run: Content of `run.json`, as JSON values; NaN and infinite numbers become texts.
            timeout_s: Time limit of the wait for the other writers, in seconds.
            given_up: Returns whether to stop waiting, since a writer has failed.

        Raises:
            CheckpointError: A writer did not finish in time, or shards are missing: the attempt is then
                removed. Or the manifest cannot be written.
        """
        return CheckpointTransaction(self._storage, step, token).commit(
            writers, run, timeout_s, given_up
        )

    def prune(self, *, keep_last: int, keep: Collection[int] = ()) -> list[int]:
        """Removes old checkpoints, and leftovers of failed attempts older than the newest complete one.

        Args:
            keep_last: Number of newest complete checkpoints to keep, at least 1.
            keep: Steps of further checkpoints to keep.

        Returns:
            The removed steps, ascending.

        Raises:
            CheckpointError: A checkpoint cannot be removed.
        """
        if keep_last < 1:
            raise CheckpointError(f"keep_last: expected at least 1, received {keep_last}.")
        results = self._open_all()
        complete = {step: each for step, each in results.items() if isinstance(each, Checkpoint)}
        kept = {*list(complete)[-keep_last:], *complete.keys() & set(keep)}
        past = [step for step in results if step < max(complete, default=0)]
        removed = [step for step in past if step not in kept]
        with self._os_errors("pruned"):
            for step in removed:
                self._storage.remove(folder_of(step), MANIFEST)
            for step in set(past) & kept:
                self._remove_other_attempts(complete[step])
            self._storage.remove_leftovers()
        return removed

    def _remove_other_attempts(self, checkpoint: Checkpoint) -> None:
        """Removes the files of other attempts to save this step."""
        folder = folder_of(checkpoint.step)
        for token in self._storage.folders(folder):
            if token != checkpoint.token:
                self._storage.remove(f"{folder}/{token}", MANIFEST)

    def _open_all(self) -> dict[int, Checkpoint | CheckpointError | None]:
        """Opens every folder that is named as a checkpoint, by step; None for one without manifest."""
        with self._os_errors("read"):
            return {step: self._open(step) for step in self._steps()}

    def _steps(self) -> list[int]:
        """Steps in the names of folders, ascending."""
        names = self._storage.folders("")
        steps = [int(match[1]) for name in names if (match := _STEP.fullmatch(name))]
        return sorted(step for step in steps if folder_of(step) in names)

    def _open(self, step: int) -> Checkpoint | CheckpointError | None:
        folder = folder_of(step)
        try:
            checkpoint = open_checkpoint(self._storage, folder)
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            still_exists = MANIFEST in self._storage.sizes(folder)  # else it was removed just now
            return error if still_exists else None
        if checkpoint.step != step:
            return CheckpointError(
                f"{checkpoint.location} is the checkpoint of step {checkpoint.step}."
            )
        return checkpoint

    @contextmanager
    def _os_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.location} cannot be {verb}: {error}") from error


def checkpoint_at(location: str | os.PathLike[str]) -> Checkpoint:
    """Opens the checkpoint at a path or URL; of a folder of checkpoints or a run directory, the newest.

    Raises:
        CheckpointError: There is no checkpoint, or it is incomplete or damaged.
    """
    checkpoint = open_if_checkpoint(location)
    if checkpoint is None:
        folder = folder_at(location)
        checkpoint = folder.newest()
        if checkpoint is None:
            damaged = "".join(f" {fault}" for fault in folder.damaged().values())
            raise CheckpointError(
                f"{location}: there is no complete checkpoint, nor a folder or a run directory with"
                f" one.{damaged}"
            )
    return checkpoint


def folder_at(location: str | os.PathLike[str]) -> CheckpointFolder:
    """The folder of checkpoints at a path or URL, or in the run directory there."""
    subfolder = f"{os.fspath(location).rstrip('/')}/{CHECKPOINTS_FOLDER}"
    is_run_directory = CHECKPOINTS_FOLDER in storage_at(location).folders("")
    return CheckpointFolder(subfolder if is_run_directory else location)


def open_if_checkpoint(location: str | os.PathLike[str]) -> Checkpoint | None:
    """Opens the checkpoint in this very folder; None if the folder is not one of a checkpoint.

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
