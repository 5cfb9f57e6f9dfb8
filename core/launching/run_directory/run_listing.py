"""Lists run directories with the state and progress of their runs (`isotrain runs`)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isotrain.core.contracts.events import (
    Finished,
    ProcessEvent,
    Ready,
    RunFailed,
    Scalars,
    Steps,
    read_event,
)
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.json_records import value
from isotrain.core.launching.run_directory.run_directory import (
    EVENTS_FILE,
    PLAN_FILE,
    RESULT_FILE,
    SPEC_FILE,
    STEPS_FILE,
    RunDirectory,
    read_events,
    read_fields,
)

State = Literal["running", "finished", "failed", "stopped", "damaged"]
"""`running`: its lock is held. `stopped`: it is not running, and recorded no end, as after a kill or Ctrl-C.
`damaged`: its files cannot be read."""
_FIELD_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("replicas", "total_steps"), int | None),
    **dict.fromkeys(("started", "loss"), float | None),
    "step": int,
}
"""Types of the fields of a listing that are not text."""
_FOREIGN_FILE_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors of reading files that no run has written, or a run of another version."""
CHUNK_BYTES = 1 << 16
"""Block size in bytes for reading the last line of a file."""


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run directory.

    Attributes:
        directory: Path of the run directory.
        state: State of the run.
        why: First line of the failure, or what is damaged; None otherwise.
        plan: Content of `plan.json`; empty if it is damaged.
        started: Start of its first process in seconds since 1970; None before.
        done: Number of recorded steps.
        total_steps: Steps of the whole run; None if unknown or unlimited.
        loss: Loss of the last recorded step.
    """

    directory: Path
    state: State
    why: str | None
    plan: Mapping[str, Any]
    started: float | None
    done: int
    total_steps: int | None
    loss: float | None

    def to_dict(self) -> dict[str, Any]:
        """The summary as JSON values."""
        names = ("run", "backend", "collective", "strategy", "launcher", "replicas")
        return {
            "directory": str(self.directory),
            "state": self.state,
            "why": self.why,
            **{name: self.plan.get(name) for name in names},
            "started": self.started,
            "step": self.done,
            "total_steps": self.total_steps,
            "loss": self.loss,
        }


def runs_in(folder: str | os.PathLike[str]) -> list[RunSummary]:
    """Summaries of the run directories in a folder, or of the folder itself, ordered by start time.

    Raises:
        PlanError: The folder does not exist.
    """
    parent = Path(folder)
    if not parent.is_dir():
        raise PlanError(
            f"there is no folder {folder}. Expected one with run directories, as `isotrain run` makes them"
            " in runs/, or a run directory."
        )
    runs = [summarize_run(path) for path in (parent, *parent.iterdir()) if _is_run(path)]
    return sorted(runs, key=lambda run: (run.started or float("inf"), str(run.directory)))


def _is_run(path: Path) -> bool:
    try:
        return (path / SPEC_FILE).is_file()
    except OSError:  # a folder of another user
        return False


def summarize_run(folder: Path) -> RunSummary:
    """Reads a run directory; a damaged one gives a summary with state `damaged`, and no error."""
    try:
        return _read(folder)
    except (IsotrainError, *_FOREIGN_FILE_ERRORS) as error:
        why = str(error) or type(error).__name__
        return RunSummary(folder, "damaged", why, {}, None, 0, None, None)


def _read(folder: Path) -> RunSummary:
    plan = read_fields(folder, PLAN_FILE)
    started, measured = _read_start(folder / EVENTS_FILE)
    done, loss = _read_progress(folder / STEPS_FILE)
    state, why = _read_state(folder)
    total = plan.get("total_steps") or measured.get("total_steps")
    summary = RunSummary(folder, state, why, plan, started, done, total, loss)
    for name, field in summary.to_dict().items():
        value(_FIELD_TYPES.get(name, str | None), field, f"{folder}: {name}")
    if started is not None:
        time.localtime(started)  # raises for a year out of range
    return summary


def _read_start(events: Path) -> tuple[float | None, Mapping[str, Any]]:
    """Time of the first event, and the plan with model statistics from the `Ready` event (empty before)."""
    started = None
    for event in read_events(events):
        if isinstance(event, ProcessEvent):
            started = started or event.time
        if isinstance(event, Ready) and event.plan:
            return started, value(dict[str, Any], event.plan, f"{events}: plan")
    return started, {}


def _read_progress(steps: Path) -> tuple[int, float | None]:
    """Number of steps done, and the last loss; the file may end with other scalars of these steps."""
    for line in _lines_from_the_end(steps):
        block = read_event(line)
        if isinstance(block, Steps):
            return block.first + len(block.losses), block.losses[-1]
        if not isinstance(block, Scalars):
            raise IsotrainError(f"{steps}: expected a `steps` event, received {line!r:.60}")
    return 0, None


def _read_state(folder: Path) -> tuple[State, str | None]:
    if RunDirectory(folder).is_locked():
        return "running", None
    line = _last_line(folder / EVENTS_FILE)
    last = None if line is None else read_event(line)
    if isinstance(last, RunFailed):
        return "failed", last.message.partition("\n")[0]
    has_ended = (folder / RESULT_FILE).exists() or isinstance(last, Finished)
    return ("finished" if has_ended else "stopped"), None


def _last_line(path: Path) -> bytes | None:
    """The last complete line; None if there is none. The file may be long and still growing."""
    return next(_lines_from_the_end(path), None)


def _lines_from_the_end(path: Path) -> Iterator[bytes]:
    """The complete lines of a file, the last first; none of a file that is not there."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        position = stream.seek(0, os.SEEK_END)
        line, is_growing = b"", True
        while position:
            size = min(CHUNK_BYTES, position)
            position = stream.seek(position - size)
            line, *lines = (stream.read(size) + line).split(b"\n")
            if lines and is_growing:
                lines.pop()
                is_growing = False
            yield from reversed(lines)
    if line and not is_growing:
        yield line
