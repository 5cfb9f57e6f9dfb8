"""Launches the runs in which checks are made, without output, and returns their results."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.core import api
from isotrain.core.errors import IsotrainError
from isotrain.core.session.session import Session
from isotrain.core.system.files import atomic_write

SpecFields = Mapping[str, Any]

DEVICE_VARIABLE = "ISOTRAIN_CONFORMANCE_DEVICE"
"""Environment variable with the `device` of all checked runs; their processes inherit it."""


def on_device(spec: SpecFields) -> SpecFields:
    """The spec, on the device of the checked runs where it has none and the variable names one."""
    device = os.environ.get(DEVICE_VARIABLE)
    return spec if device is None else {"device": device, **spec}


@dataclass(frozen=True)
class Run:
    """Result of a run.

    Attributes:
        returned: Return values by rank; empty when the run failed.
        notes: Notes of the processes, by rank; also of failed runs.
        failure: Error text of a failed run, or None.
        ended: Time when all processes had exited, in seconds since 1970.
        exit_seconds: Seconds from the end of the last process's work to that time.
        folder: Run directory.
    """

    returned: list[Any]
    notes: dict[int, dict[str, Any]]
    failure: str | None
    ended: float
    exit_seconds: float
    folder: Path

    def forget(self) -> None:
        """Removes the run directory."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Notes:
    """Notes of one process, saved to a file at each change: they survive a run that fails."""

    def __init__(self, session: Session) -> None:
        self._path = session.run_directory / f"notes-{session.rank}.json"
        self._found: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Adds a note, of JSON types, and saves the file."""
        self._found[name] = value
        atomic_write(self._path, json.dumps(self._found))


def try_run(work: Callable[[Session], Any], spec: SpecFields, backend: str, replicas: int) -> Run:
    """Launches a run that may fail; the run directory of a failed run stays until `Run.forget`."""
    folder = Path(tempfile.mkdtemp(prefix="isotrain-conformance-"))
    finished = time.time()

    def on_event(event: Mapping[str, Any]) -> None:
        nonlocal finished
        if event["event"] == "finished":
            finished = event["time"]

    returned, failure = [], None
    try:
        returned = api.launch(
            work,
            on_device(spec),
            backend=backend,
            replicas=replicas,
            output=folder,
            on_event=on_event,
        )
    except IsotrainError as error:
        failure = str(error)
    ended = time.time()
    run = Run(returned, _read_notes(folder), failure, ended, ended - finished, folder)
    if failure is None:
        run.forget()
    return run


def _read_notes(folder: Path) -> dict[int, dict[str, Any]]:
    paths = {int(path.stem.removeprefix("notes-")): path for path in folder.glob("notes-*.json")}
    return {rank: json.loads(paths[rank].read_text(encoding="utf-8")) for rank in sorted(paths)}
