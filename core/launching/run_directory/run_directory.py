"""The directory of a run: everything about it, in readable text."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from isotrain.core.checkpoints.open_storage import CHECKPOINTS_FOLDER
from isotrain.core.contracts.events import EpochEnded, Event, Steps, read_event
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError
from isotrain.core.json_format import json_page
from isotrain.core.json_records import read_json, value
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware
from isotrain.core.system.files import atomic_write, is_url, rewrite_lines

SPEC_FILE = "spec.json"
PLAN_FILE = "plan.json"
EVENTS_FILE = "events.jsonl"
STEPS_FILE = "steps.jsonl"
RESULT_FILE = "result.json"
EARLIER_RESULT_FILE = "result-before.json"
"""The result that a run had before it was resumed."""
VERSIONS_FILE = "versions.json"
KEPT_BY_LAUNCHER = frozenset(
    (SPEC_FILE, PLAN_FILE, EVENTS_FILE, STEPS_FILE, RESULT_FILE, VERSIONS_FILE)
)
"""What who starts a run writes of what its processes tell; the other files are rank 0's."""
_LOCK_FILE = ".lock"
_LOOK_SECONDS = 0.2
"""Longer than anyone who only looks whether a run goes on keeps it from doing so."""


class RunDirectory:
    """Creates a run's directory and writes its records.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: set[str] = set()
        """Names of the records that are to be there from now on."""

    @classmethod
    def create(cls, name: str, path: str | os.PathLike[str] | None) -> RunDirectory:
        """Makes a new directory: `path`, or `runs/<name>-<time>` where no other run has it.

        Raises:
            PlanError: It holds files already, cannot be made, or is no path of this machine.
        """
        if path is not None and is_url(os.fspath(path)):
            raise PlanError(
                "the run directory: expected a folder of this machine, where records are written step by"
                f" step, received {path}. Only checkpoints lie behind a URL: `checkpoint.folder` in the spec."
            )
        try:
            return cls(_exactly(Path(path)) if path is not None else _fresh(name))
        except OSError as error:
            raise PlanError(
                f"the run directory cannot be made: {error}. Choose another with --run-dir."
            ) from error

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Takes the directory of a run that has ended, to go on in it.

        Raises:
            PlanError: There is none, or it is a checkpoint, or a folder of them.
        """
        found = Path(path)
        if not (found / SPEC_FILE).is_file():
            raise _lacking(found, SPEC_FILE)
        if has_checkpoints_itself(found):
            raise PlanError(
                f"{found} is a checkpoint or a folder of them, and no run directory, whatever else lies in"
                " it. A run goes on from it with your own spec: isotrain run SPEC --resume FOLDER."
            )
        return cls(found.resolve())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps every other run out of the directory.

        Raises:
            PlanError: Another one is in it.
        """
        with (self.path / _LOCK_FILE).open("w") as lock:
            deadline = time.monotonic() + _LOOK_SECONDS
            while not _locked(lock, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise PlanError(
                        f"a run goes on in {self.path}. Wait for its end, or end it, before you resume it."
                    )
                time.sleep(_LOOK_SECONDS / 10)
            yield

    def remove_unused(self) -> None:
        """Removes a directory that nothing was written into by the run that holds it, which calls this."""
        with contextlib.suppress(OSError):
            if [each.name for each in self.path.iterdir()] == [_LOCK_FILE]:
                (self.path / _LOCK_FILE).unlink()
                self.path.rmdir()

    def is_locked(self) -> bool:
        """Whether a run goes on in it."""
        try:
            with (self.path / _LOCK_FILE).open() as lock:
                return not _locked(lock, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    def rewind(self, step: int) -> None:
        """Forgets what the run told of steps from this one on: they are taken again.

        A result that it had is kept under another name: the run has ended no more.

        Raises:
            RunFailedError: The disk is full, or the directory is gone.
        """
        try:
            _rewrite(self.path / STEPS_FILE, lambda event: _steps_before(event, step))
            _rewrite(self.path / EVENTS_FILE, lambda event: _unless_after(event, step))
            with contextlib.suppress(FileNotFoundError):
                (self.path / RESULT_FILE).replace(self.path / EARLIER_RESULT_FILE)
        except OSError as error:
            raise RunFailedError(self.why_unwritable(error)) from error

    def write(self, name: str, fields: Mapping[str, Any]) -> None:
        """Writes a JSON file; a reader never sees half of it.

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
        """Records what is going to be run, and on what; `packages` has the versions."""
        self.write(SPEC_FILE, spec.to_dict())
        self.write(PLAN_FILE, plan.to_dict())
        self.write(VERSIONS_FILE, {"packages": dict(packages), "machine": hardware.describe()})

    def append_event(self, event: Event) -> None:
        """Adds an event to `steps.jsonl` if it tells of steps, to `events.jsonl` otherwise.

        Raises:
            OSError: The disk is full, or the directory was removed.
        """
        self._require_spec()
        name = STEPS_FILE if isinstance(event, Steps) else EVENTS_FILE
        with (self.path / name).open("ab") as stream:
            stream.write(event.to_line())
        self._written.add(name)

    def append_output(self, text: str) -> None:
        """Adds to the log of rank 0, whose output comes through its launcher; raises as `append_event`."""
        self._require_spec()
        append_to_log(self.path, 0, text)

    def _require_spec(self) -> None:
        """Refuses to fill a removed directory anew, which a checkpoint may have made again by its name."""
        if SPEC_FILE in self._written and not (self.path / SPEC_FILE).exists():
            path = str(self.path / SPEC_FILE)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def require_kept(self) -> None:
        """Sees to it that all records are there.

        Raises:
            RunFailedError: Some were removed while the run went on.
        """
        if self.removed():
            raise RunFailedError(
                f"the run's work is done, but its files are gone. {self.removed()}"
            )

    def removed(self) -> str:
        """A sentence that names the records that are no longer there; empty where all are."""
        names = sorted(name for name in self._written if not (self.path / name).exists())
        return f"{', '.join(names)}: removed from {self.path} by others." if names else ""

    def why_unwritable(self, error: OSError) -> str:
        """Says that files of the run cannot be written or read, and what to do."""
        remedy = self.removed() or (
            "Make room there, or choose another place with --run-dir (run_directory= in Python)."
        )
        return f"the run's files in {self.path} cannot be written or read: {error}. {remedy}"


def has_checkpoints_itself(folder: Path) -> bool:
    """Whether a folder is a checkpoint or a folder of them; a run directory has those in a folder below.

    Whoever made a checkpoint may have put a `spec.json` beside its files, and what that names is code.
    """
    from isotrain.core.checkpoints.manifest import MANIFEST

    return any(any(folder.glob(pattern)) for pattern in (MANIFEST, f"step-*/{MANIFEST}"))


def read_fields(folder: Path, name: str) -> dict[str, Any]:
    """Reads a JSON file that `RunDirectory.write` wrote.

    Raises:
        PlanError: It is not there: the folder is no run directory.
        IsotrainError: It is damaged.
    """
    path = folder / name
    try:
        found: dict[str, Any] = value(dict[str, Any], read_json(path), str(path))
    except FileNotFoundError:
        raise _lacking(folder, name) from None
    return found


def _lacking(folder: Path, name: str) -> PlanError:
    return PlanError(
        f"{folder} is no run directory: it has no {name}. Expected what `isotrain run` or isotrain.run left"
        " in runs/, or in --run-dir."
    )


def read_events(path: Path) -> Iterator[Event]:
    """Reads what was told of a run from one of its files; a missing file has nothing.

    Raises:
        IsotrainError: A line is none that a run has written.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            event = _event(line, f"{path}, line {number}")
            if event is not None:
                yield event


def _event(line: bytes, where: str) -> Event | None:
    try:
        return read_event(line)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        kind = type(error).__name__
        raise IsotrainError(f"{where}: it is no event of a run ({kind}: {error}).") from None


def _rewrite(path: Path, kept: Callable[[Event], Event | None]) -> None:
    """Writes a file of events anew, with what `kept` gives for each."""
    if path.exists():
        rewrite_lines(path, lambda line: _kept(line, _event(line, str(path)), kept))


def _kept(line: bytes, event: Event | None, kept: Callable[[Event], Event | None]) -> bytes | None:
    if event is None:  # of a later version
        return line
    found = kept(event)
    if found is None or found is event:
        return line if found else None
    return found.to_line()


def _steps_before(event: Event, step: int) -> Event | None:
    if not isinstance(event, Steps) or event.first >= step:
        return None
    count = step - event.first
    if count >= len(event.losses):
        return event
    return replace(event, losses=event.losses[:count], learning_rates=event.learning_rates[:count])


def _unless_after(event: Event, step: int) -> Event | None:
    return None if isinstance(event, EpochEnded) and event.done > step else event


def last_weights_path(folder: Path, steps: int) -> Path:
    """The file with the weights that a run had after so many steps, until it has finished."""
    return folder / f"weights-after-{steps}-steps.safetensors"


def last_weights_file(folder: Path) -> Path | None:
    """The newest weights of a run that has not finished."""
    found = folder.glob("weights-after-*-steps.safetensors")
    steps = {path: path.name.split("-")[2] for path in found}
    own = [path for path, count in steps.items() if count.isdecimal()]
    return max(own, key=lambda path: int(steps[path]), default=None)


def checkpoint_folder(spec: TrainingSpec, folder: Path) -> str:
    """Where the checkpoints of a run lie: a folder or an fsspec URL."""
    return checkpoints_in(None if spec.checkpoint is None else spec.checkpoint.folder, folder)


def checkpoints_in(named: str | None, folder: Path) -> str:
    """The same, by the `folder` of a spec's checkpoints."""
    return named or str(folder / CHECKPOINTS_FOLDER)


def rank_log(folder: Path, rank: int) -> Path:
    """The file with the output of a rank."""
    return folder / f"rank-{rank}.log"


def append_to_log(folder: Path, rank: int, text: str) -> None:
    """Adds to the output of a rank."""
    with rank_log(folder, rank).open("a", encoding="utf-8") as log:
        log.write(text)


def _locked(lock: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _exactly(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise PlanError(f"the run directory {path} is not empty. Choose another or empty it.")
    return path.resolve()


def _fresh(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = Path("runs") / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path.resolve()
    raise PlanError(f"runs/{name}-{stamp}-* all exist; choose a directory with --run-dir.")
