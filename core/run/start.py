"""The run directory of a run, and the checkpoint that it starts from.

Checkpoints are looked for where they can be only: what reads them imports NumPy, for which the start of
other runs need not wait.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.launcher import LauncherChoice
from isotrain.core.contracts.plan import backend_label
from isotrain.core.errors import CheckpointError, PlanError
from isotrain.core.json_records import value
from isotrain.core.launching.run_directory.run_directory import (
    PLAN_FILE,
    SPEC_FILE,
    RunDirectory,
    checkpoint_folder,
    checkpoints_in,
    read_fields,
)
from isotrain.core.spec.training_spec import TrainingSpec

if TYPE_CHECKING:
    from isotrain.core.checkpoints.checkpoint import Checkpoint

AUTO = "auto"

PathLike = str | os.PathLike[str]


@contextlib.contextmanager
def locked_run_directory(
    spec: TrainingSpec, run_directory: PathLike | None, resume: PathLike | None
) -> Iterator[RunDirectory]:
    """Makes the run's directory, or takes that of the run which goes on; keeps all other runs out of it.

    A new directory is removed again if the run is refused before it writes anything into it.

    Args:
        spec: Training spec.
        run_directory: Directory for the run's files; None: a new one.
        resume: Checkpoint, or folder with checkpoints, to resume from; None: it begins anew.

    Raises:
        PlanError: The directory is taken, or another run is in it; nobody can know which checkpoint is
            meant; or checkpoints would be lost with the processes.
    """
    own_folder = None if spec.checkpoint is None else spec.checkpoint.folder
    if own_folder is not None and own_folder.startswith("memory:"):
        raise PlanError(
            f"checkpoint.folder: {own_folder} is in the memory of one process, and is gone when a run's"
            " processes end. Name a folder or a bucket; only `open_session` can save there."
        )
    if resume is None and own_folder is not None:
        _require_no_checkpoints(own_folder)
    if resume == AUTO and run_directory is None and own_folder is None:
        raise PlanError(
            "resume auto: give the run directory (--output), which is where the run's checkpoints lie, or"
            " `checkpoint.folder` in the spec."
        )
    is_new = run_directory is None or not Path(run_directory).exists()
    directory = (
        RunDirectory.create(spec.name, run_directory)
        if resume is None
        else _directory(spec, run_directory)
    )
    with directory.locked():
        try:
            yield directory
        except BaseException:
            if is_new:
                directory.remove_unused()
            raise


def starting_checkpoint(
    spec: TrainingSpec, directory: RunDirectory, resume: PathLike | None
) -> Checkpoint | None:
    """The checkpoint that a run starts from; None for a new run.

    Args:
        spec: Training spec.
        directory: Directory of the run.
        resume: A checkpoint, a folder of them or a run directory; `auto`: the run's own newest, if there is
            one; None: nothing.

    Raises:
        PlanError: The run's own folder has newer ones.
        IsotrainError: There is no such checkpoint.
    """
    if resume is None:
        return None
    from isotrain.core.checkpoints.folder import CheckpointFolder, checkpoint_at

    folder = checkpoint_folder(spec, directory.path)
    if resume == AUTO:
        return CheckpointFolder(folder).newest()
    try:
        checkpoint = checkpoint_at(resume)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_why_none(resume, folder, directory)}") from error.__cause__
    _require_newest(checkpoint, folder)
    return checkpoint


def _directory(spec: TrainingSpec, path: PathLike | None) -> RunDirectory:
    """Run directory of a run which is there already, or a new one."""
    if path is not None and (Path(path) / SPEC_FILE).is_file():
        return RunDirectory(Path(path).resolve())
    return RunDirectory.create(spec.name, path)


def _why_none(resume: PathLike, own: str, directory: RunDirectory) -> str:
    """Explanation, from the spec of a run, why no checkpoint was found; may be empty.

    Args:
        resume: Run directory, or folder of checkpoints, from which a run was to resume.
        own: Folder in which the checkpoints of the run in `directory` would lie.
        directory: Directory of the run that was to resume.
    """
    from isotrain.core.checkpoints.folder import folder_at

    given = Path(resume)
    runs = (given, given.parent, *([directory.path] if os.fspath(resume) == own else ()))
    found = next((each for each in runs if _is_run(each)), None)
    if found is None or folder_at(resume).damaged():
        return ""
    policy = _policy(found)
    if policy is None:
        return (
            " The spec of that run has no `checkpoint`, so that it saved none. Begin it anew with one, such"
            " as `checkpoint: {every_epochs: 1}`."
        )
    names = ("every_steps", "every_epochs", "every_minutes")
    when = ", ".join(f"{name}: {policy[name]}" for name in names if policy.get(name) is not None)
    told = f"`checkpoint: {{{when}}}`" if when else "no interval in `checkpoint`"
    return f" The spec of that run has {told}: it ended before its first one was complete."


def _is_run(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (SPEC_FILE, PLAN_FILE))


def _require_no_checkpoints(folder: str) -> None:
    from isotrain.core.checkpoints.folder import CheckpointFolder

    newest = CheckpointFolder(folder).newest()
    if newest is not None:
        raise PlanError(
            f"checkpoint.folder: {folder} has checkpoints of another run, up to step {newest.step}. Resume"
            " that (--resume auto), remove them, or choose another folder."
        )


def _require_newest(checkpoint: Checkpoint, folder: str) -> None:
    """Keeps two ways that a run went out of one folder."""
    from isotrain.core.checkpoints.folder import CheckpointFolder

    newest = CheckpointFolder(folder).newest()
    if newest is not None and newest.step > checkpoint.step:
        raise PlanError(
            f"{folder} has newer checkpoints than {checkpoint.location}, up to step {newest.step}. To go on"
            " from the older one, give another run directory (--output), or remove the newer ones."
        )


def _policy(path: Path) -> dict[str, Any] | None:
    """Checkpoint policy of the spec in a run directory; None if it has none.

    Raises:
        PlanError: It is no run directory.
        IsotrainError: Its file is damaged.
    """
    found = read_fields(path, SPEC_FILE).get("checkpoint")
    policy: dict[str, Any] | None = value(
        dict[str, Any] | None, found, f"{path / SPEC_FILE}: checkpoint"
    )
    return policy


@dataclass(frozen=True)
class PreviousRun:
    """A previous run, as its run directory describes it.

    Attributes:
        directory: Run directory.
        spec: Path of its `spec.json`.
        backend: `NAME` or `NAME:COLLECTIVE`, as requested.
        replicas: Number of replicas.
        launcher: Launcher that started its processes; the local one where they were started from outside.
        checkpoints: Location of its checkpoints: a folder or an fsspec URL.
    """

    directory: Path
    spec: Path
    backend: str
    replicas: int
    launcher: LauncherChoice
    checkpoints: str

    @classmethod
    def of(cls, run_directory: PathLike) -> PreviousRun:
        """Reads the plan and the spec of a run.

        Raises:
            PlanError: It is no run directory.
            IsotrainError: A file in it is damaged.
        """
        path = RunDirectory.reopen(run_directory).path
        plan, where = read_fields(path, PLAN_FILE), path / PLAN_FILE
        name, launched_by = (
            value(str, plan.get(field), f"{where}: {field}") for field in ("backend", "launcher")
        )
        requested = value(
            str | None, plan.get("requested_collective"), f"{where}: requested_collective"
        )
        replicas = value(int, plan.get("replicas"), f"{where}: replicas")
        backend = backend_label(name, requested)
        options = plan.get("launcher_options")
        options = value(dict[str, Any] | None, options, f"{where}: launcher_options")
        launcher = LauncherChoice() if options is None else LauncherChoice(launched_by, options)
        where = path / SPEC_FILE
        folder = (_policy(path) or {}).get("folder")
        folder = value(str | None, folder, f"{where}: checkpoint.folder")
        return cls(path, where, backend, replicas, launcher, checkpoints_in(folder, path))

    def newest_folder(self, spec: TrainingSpec) -> str:
        """Folder in which to look for the newest checkpoint: the run's own; if it has none, the spec's.

        Args:
            spec: Spec with which the run is to resume, which may keep its checkpoints elsewhere.
        """
        from isotrain.core.checkpoints.folder import CheckpointFolder

        asked = checkpoint_folder(spec, self.directory)
        if asked == self.checkpoints or CheckpointFolder(self.checkpoints).newest() is not None:
            return self.checkpoints
        return asked
