"""How a checkpoint comes about: everybody's share, and then the manifest."""

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
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 1.0
"""From one look at who has written to the next; the time between them doubles."""


@dataclass(frozen=True)
class CheckpointTransaction:
    """One attempt to save, by all who write.

    Attributes:
        storage: The folder of checkpoints.
        step: Steps that were done.
        token: What this attempt's writers have in common with no other's: the name of their folder.
    """

    storage: Storage
    step: int
    token: str

    @property
    def folder(self) -> str:
        """Of the checkpoint."""
        return folder_of(self.step)

    @property
    def inner(self) -> str:
        """The folder of everything but the manifest."""
        return f"{self.folder}/{plain_name(self.token, self.storage.where(self.folder))}"

    def write(self, writer: int, sections: Mapping[str, Section]) -> None:
        """Writes one writer's share, or nothing.

        Raises:
            CheckpointError: It cannot be written.
        """
        inner = self.inner
        names = [f"{plain_name(section, inner)}-{writer:05}.safetensors" for section in sections]
        try:
            files = [
                write_tensors(self.storage, inner, name, section, sections[section])
                for name, section in zip(names, sections, strict=True)
            ]
            path = f"{inner}/{_record_name(writer)}"
            write_record(self.storage, path, WriterRecord(FORMAT, writer, files))
        except (OSError, CheckpointError) as error:
            self._discard([*names, _record_name(writer)])
            raise self._not_written(error) from error

    def commit(
        self, writers: int, run: Mapping[str, Any], timeout_s: float, given_up: Callable[[], bool]
    ) -> Checkpoint:
        """Makes a checkpoint of what all have written.

        Raises:
            CheckpointError: Somebody did not write in time, or the shares make no whole: then they are
                removed. Or it cannot be written.
        """
        try:
            records, files = self._gathered(writers, timeout_s, given_up)
        except CheckpointError:
            with contextlib.suppress(OSError):
                self.storage.remove(self.inner, _record_name(0))
            raise
        except OSError as error:
            raise self._not_written(error) from error
        try:
            note = write_json(self.storage, f"{self.inner}/{_RUN}", run)
            manifest = Manifest(FORMAT, self.step, self.token, note, records, files)
            write_manifest(self.storage, f"{self.folder}/{MANIFEST}", manifest)
            return open_checkpoint(self.storage, self.folder)
        except OSError as error:
            raise self._not_written(error) from error

    def _gathered(
        self, writers: int, timeout_s: float, given_up: Callable[[], bool]
    ) -> tuple[list[FileRecord], dict[str, int]]:
        """The writers' records, and the bytes of all tensor files, once all have written."""
        names = [_record_name(writer) for writer in range(writers)]
        self._wait_for(names, timeout_s, given_up)
        found = [read_new_record(self.storage, f"{self.inner}/{name}") for name in names]
        files = [file for _, record in found for file in record.files]
        index(files, self.storage.where(self.inner))
        return [file for file, _ in found], {file.name: file.bytes for file in files}

    def _wait_for(self, names: list[str], timeout_s: float, given_up: Callable[[], bool]) -> None:
        deadline, pause = time.monotonic() + timeout_s, _FIRST_LOOK_S
        while missing := sorted(set(names) - set(self.storage.sizes(self.inner))):
            rest = deadline - time.monotonic()
            if rest <= 0 or given_up():
                why = "a writer failed" if rest > 0 else f"after {timeout_s:g} s"
                raise CheckpointError(
                    f"{self.storage.where(self.inner)} is given up: {why}; it lacks"
                    f" {', '.join(missing[:5])} of {len(names)} writers."
                )
            time.sleep(min(pause, rest))
            pause = min(2 * pause, _LAST_LOOK_S)

    def _not_written(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.storage.where(self.inner)} cannot be written: {error}")

    def _discard(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self.storage.discard(f"{self.inner}/{name}")


def folder_of(step: int) -> str:
    """The folder of the checkpoint after so many steps."""
    return f"step-{step:09}"


def _record_name(writer: int) -> str:
    return f"writer-{writer:05}.json"
