"""Writing a checkpoint as a transaction: every writer's files first, then the manifest that commits it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isotrain.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from isotrain.core.checkpoints.index import index
from isotrain.core.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    FileRecord,
    Manifest,
    WriterRecord,
    plain_name,
    read_new_record,
    write_json,
    write_manifest,
    write_record,
)
from isotrain.core.checkpoints.safetensors_shard import write_tensors
from isotrain.core.checkpoints.storage import Storage
from isotrain.core.checkpoints.tensor_part import Section
from isotrain.core.errors import CheckpointError

_RUN = "run.json"
_FIRST_POLL_S, _LAST_POLL_S = 0.01, 1.0
"""Seconds between two polls for the writers' records: exponential backoff."""


@dataclass(frozen=True)
class CheckpointTransaction:
    """One attempt of all writers to save a checkpoint.

    Attributes:
        storage: Storage of the folder of checkpoints.
        step: Number of steps done.
        token: Unique token of this attempt, shared by its writers: the name of their folder.
    """

    storage: Storage
    step: int
    token: str

    @property
    def folder(self) -> str:
        """Folder of the checkpoint."""
        return folder_of(self.step)

    @property
    def attempt_folder(self) -> str:
        """Folder of all files but the manifest."""
        return f"{self.folder}/{plain_name(self.token, self.storage.where(self.folder))}"

    def write(self, writer: int, sections: Mapping[str, Section]) -> None:
        """Writes one writer's files; removes them again on failure.

        Raises:
            CheckpointError: A file cannot be written.
        """
        folder = self.attempt_folder
        names = [f"{plain_name(section, folder)}-{writer:05}.safetensors" for section in sections]
        try:
            files = [
                write_tensors(self.storage, folder, name, section, sections[section])
                for name, section in zip(names, sections, strict=True)
            ]
            path = f"{folder}/{_record_name(writer)}"
            write_record(self.storage, path, WriterRecord(FORMAT, writer, files))
        except (OSError, CheckpointError) as error:
            for name in (*names, _record_name(writer)):
                with contextlib.suppress(OSError):
                    self.storage.discard(f"{folder}/{name}")
            raise self._write_error(error) from error

    def commit(
        self, writers: int, run: Mapping[str, Any], timeout_s: float, given_up: Callable[[], bool]
    ) -> Checkpoint:
        """Waits for all writers, and writes the manifest; errors are those of `CheckpointFolder.commit`."""
        try:
            records, files = self._gather_records(writers, timeout_s, given_up)
        except CheckpointError:
            with contextlib.suppress(OSError):
                self.storage.remove(self.attempt_folder, _record_name(0))
            raise
        except OSError as error:
            raise self._write_error(error) from error
        try:
            run_record = write_json(self.storage, f"{self.attempt_folder}/{_RUN}", run)
            manifest = Manifest(FORMAT, self.step, self.token, run_record, records, files)
            write_manifest(self.storage, f"{self.folder}/{MANIFEST}", manifest)
            return open_checkpoint(self.storage, self.folder)
        except OSError as error:
            raise self._write_error(error) from error

    def _gather_records(
        self, writers: int, timeout_s: float, given_up: Callable[[], bool]
    ) -> tuple[list[FileRecord], dict[str, int]]:
        """File records of all writers' records, and the size of each tensor file in bytes."""
        folder, names = self.attempt_folder, [_record_name(writer) for writer in range(writers)]
        self._wait_for(names, timeout_s, given_up)
        records = [read_new_record(self.storage, f"{folder}/{name}") for name in names]
        files = [file for _, record in records for file in record.files]
        index(files, self.storage.where(folder))
        return [file for file, _ in records], {file.name: file.bytes for file in files}

    def _wait_for(self, names: list[str], timeout_s: float, given_up: Callable[[], bool]) -> None:
        deadline, pause = time.monotonic() + timeout_s, _FIRST_POLL_S
        while missing := sorted(set(names) - set(self.storage.sizes(self.attempt_folder))):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or given_up():
                reason = "a writer failed" if remaining > 0 else f"after {timeout_s:g} s"
                raise CheckpointError(
                    f"{self.storage.where(self.attempt_folder)} is given up: {reason}; it lacks"
                    f" {', '.join(missing[:5])} of {len(names)} writers."
                )
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _LAST_POLL_S)

    def _write_error(self, error: Exception) -> CheckpointError:
        folder = self.storage.where(self.attempt_folder)
        return CheckpointError(f"{folder} cannot be written: {error}")


def folder_of(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:09}"


def _record_name(writer: int) -> str:
    return f"writer-{writer:05}.json"
