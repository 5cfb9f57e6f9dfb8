"""What run directories tell of their runs: how far each came, and what became of it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isotrain.core.contracts.events import (
    Finished,
    ProcessEvent,
    Ready,
    RunFailed,
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
"""`stopped`: nobody is in it, and it says nothing of its end, as after a kill or Ctrl-C; `damaged`: its files
cannot be read."""
_TOLD: Mapping[str, Any] = {
    **dict.fromkeys(("replicas", "total_steps"), int | None),
    **dict.fromkeys(("started", "loss"), float | None),
    "step": int,
}
"""What a listing has of a run that is no text."""
_OF_OTHER_FILES = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What reading files raises that no run has written, or one of another version."""
CHUNK_BYTES = 1 << 16
"""Of a file whose end is looked for, read at a time."""


@dataclass(frozen=True)
class RunSummary:
    """One run directory.

    Attributes:
        directory: Where it is.
        state: What became of the run.
        why: The first line of the failure, or what is damaged.
        plan: Its `plan.json`, and empty where that is damaged.
        started: When its first process started, in seconds since 1970; None before.
        done: Steps taken, as far as they were written down.
        total_steps: Of the run; None until known, and for a run without an end.
        loss: Of the last of these steps.
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
        """What listings have of it, as plain JSON values."""
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
    """Every run whose directory is in a folder, or is this folder, in the order in which they started.

    Raises:
        PlanError: There is no such folder.
    """
    top = Path(folder)
    if not top.is_dir():
        raise PlanError(
            f"there is no folder {folder}. Expected one with run directories, as `isotrain run` makes them"
            " in runs/, or a run directory."
        )
    found = [path for path in (top, *top.iterdir()) if _is_run(path)]
    runs = [summarize_run(path) for path in found]
    return sorted(runs, key=lambda run: (run.started or float("inf"), str(run.directory)))


def _is_run(path: Path) -> bool:
    try:
        return (path / SPEC_FILE).is_file()
    except OSError:  # a folder of somebody else
        return False


def summarize_run(folder: Path) -> RunSummary:
    """Reads a run directory; one that is damaged says so, whatever its files hold."""
    try:
        return _read(folder)
    except (IsotrainError, *_OF_OTHER_FILES) as error:
        why = str(error) or type(error).__name__
        return RunSummary(folder, "damaged", why, {}, None, 0, None, None)


def _read(folder: Path) -> RunSummary:
    plan = read_fields(folder, PLAN_FILE)
    started, measured = _beginning(folder / EVENTS_FILE)
    done, loss = _progress(folder / STEPS_FILE)
    state, why = _state(folder)
    total = plan.get("total_steps") or measured.get("total_steps")
    found = RunSummary(folder, state, why, plan, started, done, total, loss)
    for name, told in found.to_dict().items():
        value(_TOLD.get(name, str | None), told, f"{folder}: {name}")
    if started is not None:
        time.localtime(started)  # of any year that a calendar has
    return found


def _beginning(events: Path) -> tuple[float | None, Mapping[str, Any]]:
    """When the first event was, and the plan completed with what was measured."""
    started = None
    for event in read_events(events):
        if isinstance(event, ProcessEvent):
            started = started or event.time
        if isinstance(event, Ready) and event.plan:
            return started, value(dict[str, Any], event.plan, f"{events}: plan")
    return started, {}


def _progress(steps: Path) -> tuple[int, float | None]:
    line = _last_line(steps)
    if line is None:
        return 0, None
    block = read_event(line)
    if not isinstance(block, Steps):
        raise IsotrainError(f"{steps}: expected steps that were done, received {line!r:.60}")
    return block.first + len(block.losses), block.losses[-1]


def _state(folder: Path) -> tuple[State, str | None]:
    if RunDirectory(folder).is_locked():
        return "running", None
    line = _last_line(folder / EVENTS_FILE)
    last = None if line is None else read_event(line)
    if isinstance(last, RunFailed):
        return "failed", last.message.partition("\n")[0]
    has_ended = (folder / RESULT_FILE).exists() or isinstance(last, Finished)
    return ("finished" if has_ended else "stopped"), None


def _last_line(path: Path) -> bytes | None:
    """The last line that has an end; None: there is none. The file may be long, and be written to."""
    if not path.exists():
        return None
    with path.open("rb") as stream:
        position = stream.seek(0, os.SEEK_END)
        tail = b""
        while position and tail.count(b"\n") < 2:
            size = min(CHUNK_BYTES, position)
            position = stream.seek(position - size)
            tail = stream.read(size) + tail
    lines = tail.split(b"\n")[:-1]
    return lines[-1] if lines else None
