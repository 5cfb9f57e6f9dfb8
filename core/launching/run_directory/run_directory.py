"""The run directory: spec, plan, events, logs and result of a run, as JSON and text files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from isotrain.core.checkpoints.open_storage import CHECKPOINTS_FOLDER
from isotrain.core.contracts.events import (
    EpochEnded,
    Event,
    Scalars,
    Steps,
    outlasts_rewind,
    read_event,
)
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError
from isotrain.core.json_format import json_page
from isotrain.core.json_records import read_json, value
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware
from isotrain.core.system.files import atomic_write, is_url, rewrite_lines

SPEC_FILE = "spec.json"
PLAN_FILE = "plan.json"
JOIN_FILE = "join.json"
"""Address of rank 0's server for processes that join, and the key to it; only its owner can read it."""
EVENTS_FILE = "events.jsonl"
STEPS_FILE = "steps.jsonl"
RESULT_FILE = "result.json"
EARLIER_RESULT_FILE = "result-before.json"
"""Result of a finished run from before it was resumed."""
VERSIONS_FILE = "versions.json"
KEPT_BY_LAUNCHER = frozenset(
    (SPEC_FILE, PLAN_FILE, EVENTS_FILE, STEPS_FILE, RESULT_FILE, VERSIONS_FILE)
)
"""Files that the launching process writes from the events of the ranks; rank 0 writes the others."""
RUNS_VARIABLE = "ISOTRAIN_RUNS"
"""Environment variable with the folder in which new run directories are made; `runs` without it."""
LAST = "last"
"""Name for the run that was started last, among those in the runs folder."""
_LOCK_FILE = ".lock"
_LOCK_SECONDS = 0.2
"""Time limit for the exclusive lock: longer than `is_locked` holds its shared one."""


class RunDirectory:
    """A run directory: creates it, locks it, and writes its files.

    Attributes:
        path: Path of the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: set[str] = set()
        """Names of the files written so far, which must not disappear."""

    @classmethod
    def create(cls, name: str, path: str | os.PathLike[str] | None) -> RunDirectory:
        """Creates a new run directory: `path`, or a new `runs/<name>-<time>` if it is None.

        Raises:
            PlanError: It is not empty, cannot be created, or is a URL.
        """
        if path is not None and is_url(os.fspath(path)):
            raise PlanError(
                "the run directory: expected a folder of this machine, to which events are appended during"
                f" the run, received {path}. Only checkpoints can be at a URL: `checkpoint.folder` in the"
                " spec."
            )
        try:
            return cls(
                _use_empty_folder(Path(path)) if path is not None else _make_new_folder(name)
            )
        except OSError as error:
            raise PlanError(
                f"the run directory cannot be created: {error}. Choose another with --output."
            ) from error

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Opens the directory of a run that has ended, to resume the run in it.

        Raises:
            PlanError: It is no run directory, but perhaps a checkpoint or a folder of checkpoints.
        """
        folder = Path(path)
        if not (folder / SPEC_FILE).is_file():
            raise _missing_file(folder, SPEC_FILE)
        if has_checkpoints_itself(folder):
            raise PlanError(
                f"{folder} is a checkpoint or a folder of checkpoints, and no run directory, whatever other"
                " files it has. Resume from it with your own spec: isotrain run SPEC --resume FOLDER."
            )
        return cls(folder.resolve())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context with an exclusive lock on the directory (`flock`).

        Raises:
            PlanError: Another run holds it.
        """
        with (self.path / _LOCK_FILE).open("w") as lock:
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _try_lock(lock, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise PlanError(
                        f"a run is still running in {self.path}. Wait for its end, or end it, before you"
                        " resume it."
                    )
                time.sleep(_LOCK_SECONDS / 10)
            yield

    def remove_unused(self) -> None:
        """Removes the directory if its lock file is the only file; only for the holder of the lock."""
        with contextlib.suppress(OSError):
            if [entry.name for entry in self.path.iterdir()] == [_LOCK_FILE]:
                (self.path / _LOCK_FILE).unlink()
                self.path.rmdir()

    def is_locked(self) -> bool:
        """Whether a run holds the lock, that is, still runs in this directory."""
        try:
            with (self.path / _LOCK_FILE).open() as lock:
                return not _try_lock(lock, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    def rewind(self, step: int) -> None:
        """Drops the recorded steps from `step` on and later epochs, because a resumed run repeats them.

        A result is renamed to `result-before.json`, because the run is no longer finished.

        Raises:
            RunFailedError: The disk is full, or the directory is gone.
        """
        try:
            _rewrite(self.path / STEPS_FILE, lambda event: _truncate_steps(event, step))
            _rewrite(self.path / EVENTS_FILE, lambda event: _drop_epoch_after(event, step))
            with contextlib.suppress(FileNotFoundError):
                (self.path / RESULT_FILE).replace(self.path / EARLIER_RESULT_FILE)
        except OSError as error:
            raise RunFailedError(self.why_unwritable(error)) from error

    def write(self, name: str, fields: Mapping[str, Any]) -> None:
        """Writes a JSON file atomically.

        Raises:
            RunFailedError: The disk is full, or the directory is gone.
        """
        target = self.path / name
        try:
            atomic_write(target, json_page(fields) + "\n")
        except OSError as error:
            raise RunFailedError(self.why_unwritable(error)) from error
        self._written.add(name)

    def write_start(self, spec: TrainingSpec, plan: Plan, packages: Mapping[str, str]) -> None:
        """Writes the spec, the plan, and the versions of packages (by name) with the machine's hardware."""
        self.write(SPEC_FILE, spec.to_dict())
        self.write(PLAN_FILE, plan.to_dict())
        self.write(VERSIONS_FILE, {"packages": dict(packages), "machine": hardware.describe()})

    def append_event(self, event: Event) -> None:
        """Appends an event of steps or their scalars to `steps.jsonl`, any other to `events.jsonl`.

        Raises:
            OSError: The disk is full, or the directory was removed.
        """
        self._require_spec()
        name = STEPS_FILE if isinstance(event, Steps | Scalars) else EVENTS_FILE
        with (self.path / name).open("ab") as stream:
            stream.write(event.to_line())
        self._written.add(name)

    def append_output(self, text: str) -> None:
        """Appends to the log of rank 0, whose output the launching process reads.

        Raises:
            OSError: See `append_event`.
        """
        self._require_spec()
        append_to_log(self.path, 0, text)

    def _require_spec(self) -> None:
        """Refuses to write into a directory that was removed, and perhaps created again by a checkpoint."""
        if SPEC_FILE in self._written and not (self.path / SPEC_FILE).exists():
            path = str(self.path / SPEC_FILE)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def require_kept(self) -> None:
        """Checks that no file of the run was removed.

        Raises:
            RunFailedError: Some were removed during the run.
        """
        if self.removed():
            raise RunFailedError(
                f"the run's work is done, but its files are gone. {self.removed()}"
            )

    def removed(self) -> str:
        """A sentence that names the files that were removed; empty if there are none."""
        names = sorted(name for name in self._written if not (self.path / name).exists())
        return f"{', '.join(names)}: removed from {self.path} by others." if names else ""

    def why_unwritable(self, error: OSError) -> str:
        """The message for files that cannot be written or read, with a remedy."""
        remedy = self.removed() or (
            "Raise the limit of a file's size (ulimit -f)."
            if error.errno == errno.EFBIG
            else "Free disk space there, or choose another folder with --output (output= in Python)."
        )
        return f"the run's files in {self.path} cannot be written or read: {error}. {remedy}"


def has_checkpoints_itself(folder: Path) -> bool:
    """Whether a folder is a checkpoint or has checkpoints directly in it; a run directory has a subfolder.

    The check is for safety: a checkpoint from elsewhere may have a `spec.json` beside its files, and a spec
    names code to run.
    """
    from isotrain.core.checkpoints.manifest import MANIFEST

    return any(any(folder.glob(pattern)) for pattern in (MANIFEST, f"step-*/{MANIFEST}"))


def runs_folder() -> Path:
    """The folder in which new run directories are made."""
    return Path(os.environ.get(RUNS_VARIABLE) or "runs")


def locate_run(text: str) -> str:
    """The path of a run that the user names: a path or URL, a bare name in the runs folder, or `last`.

    Raises:
        PlanError: `last`, and there is no run.
    """
    if is_url(text) or Path(text).exists():
        return text
    if text == LAST:
        specs = list(runs_folder().glob(f"*/{SPEC_FILE}"))
        if not specs:
            raise PlanError(f"{LAST}: there are no runs in {runs_folder()}.")
        return str(max(specs, key=lambda spec: spec.stat().st_mtime_ns).parent)
    named = runs_folder() / text
    return str(named) if named.parent == runs_folder() and named.is_dir() else text


def read_fields(folder: Path, name: str) -> dict[str, Any]:
    """Reads a JSON file that `RunDirectory.write` wrote.

    Raises:
        PlanError: It does not exist: the folder is no run directory.
        IsotrainError: It is damaged.
    """
    path = folder / name
    try:
        fields: dict[str, Any] = value(dict[str, Any], read_json(path), str(path))
    except FileNotFoundError:
        raise _missing_file(folder, name) from None
    return fields


def _missing_file(folder: Path, name: str) -> PlanError:
    return PlanError(
        f"{folder} is no run directory: it has no {name}. Expected one that `isotrain run` or isotrain.run"
        " has written, in runs/ or --output."
    )


def read_events(path: Path) -> Iterator[Event]:
    """Reads the events of one file of a run; a missing file has none.

    Raises:
        IsotrainError: A line is no event of a run.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            event = _parse_event(line, f"{path}, line {number}")
            if event is not None:
                yield event


def steps_taken(folder: Path) -> int:
    """Number of steps that a run has reported.

    Raises:
        PlanError: The file of its steps does not exist.
    """
    if not (folder / STEPS_FILE).is_file():
        raise _missing_file(folder, STEPS_FILE)
    blocks = (event for event in read_events(folder / STEPS_FILE) if isinstance(event, Steps))
    return max((block.first + len(block.losses) for block in blocks), default=0)


def _parse_event(line: bytes, where: str) -> Event | None:
    try:
        return read_event(line)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        kind = type(error).__name__
        raise IsotrainError(f"{where}: this is no event of a run ({kind}: {error}).") from None


def _rewrite(path: Path, rewrite: Callable[[Event], Event | None]) -> None:
    """Rewrites a file of events; `rewrite` returns the replacement of an event, or None to drop it."""
    if path.exists():
        rewrite_lines(
            path, lambda line: _rewritten_line(line, _parse_event(line, str(path)), rewrite)
        )


def _rewritten_line(
    line: bytes, event: Event | None, rewrite: Callable[[Event], Event | None]
) -> bytes | None:
    if event is None:  # unknown kind, from a later version
        return line
    replacement = rewrite(event)
    if replacement is None or replacement is event:
        return line if replacement else None
    return replacement.to_line()


def _truncate_steps(event: Event, step: int) -> Event | None:
    if isinstance(event, Scalars):
        return _truncate_scalars(event, step)
    if not isinstance(event, Steps) or event.first >= step:
        return None
    count = step - event.first
    if count >= len(event.losses):
        return event
    return replace(event, losses=event.losses[:count], learning_rates=event.learning_rates[:count])


def _truncate_scalars(event: Scalars, step: int) -> Scalars | None:
    pairs = zip(event.steps, event.values, strict=True)
    records = [each for each in pairs if outlasts_rewind(*each, step)]
    if not records or len(records) == len(event.steps):
        return event if records else None
    steps, values = zip(*records, strict=True)
    return replace(event, steps=steps, values=values)


def _drop_epoch_after(event: Event, step: int) -> Event | None:
    return None if isinstance(event, EpochEnded) and event.done > step else event


def last_weights_path(folder: Path, steps: int) -> Path:
    """Path of the weights of an unfinished run after `steps` steps."""
    return folder / f"weights-after-{steps}-steps.safetensors"


def last_weights_file(folder: Path) -> Path | None:
    """Path of the newest weights of an unfinished run; None if there are none."""
    paths = folder.glob("weights-after-*-steps.safetensors")
    steps = {path: path.name.split("-")[2] for path in paths}
    counted = [path for path, count in steps.items() if count.isdecimal()]
    return max(counted, key=lambda path: int(steps[path]), default=None)


def checkpoint_folder(spec: TrainingSpec, folder: Path) -> str:
    """Folder or fsspec URL of the checkpoints of a run, given its spec and run directory."""
    return checkpoints_in(None if spec.checkpoint is None else spec.checkpoint.folder, folder)


def checkpoints_in(configured: str | None, folder: Path) -> str:
    """Folder or fsspec URL of the checkpoints of a run.

    Args:
        configured: `checkpoint.folder` of the spec.
        folder: Run directory.
    """
    return configured or str(folder / CHECKPOINTS_FOLDER)


def rank_log(folder: Path, rank: int) -> Path:
    """Path of the log with the output of a rank."""
    return folder / f"rank-{rank}.log"


def append_to_log(folder: Path, rank: int, text: str) -> None:
    """Appends text to the log of a rank."""
    with rank_log(folder, rank).open("a", encoding="utf-8") as log:
        log.write(text)


def _try_lock(lock: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _use_empty_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        has_run = (path / SPEC_FILE).is_file() and not has_checkpoints_itself(path)
        command = f"isotrain resume {shlex.quote(str(path))}"
        raise PlanError(
            f"the run directory {path} is not empty. Choose another, or empty it"
            + (f"; or go on with the run in it, by `{command}`." if has_run else ".")
        )
    return path.resolve()


def _make_new_folder(name: str) -> Path:
    folder, stamp = runs_folder(), time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = folder / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path.resolve()
    raise PlanError(f"{folder}/{name}-{stamp}-* all exist; choose a directory with --output.")
