"""Asynchronous checkpoint saving: when checkpoints are due, and writing them on a thread."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.contracts.events import CheckpointSaved, Warned
from isotrain.core.contracts.reporter import CheckpointRequest, Reporter
from isotrain.core.contracts.strategy import StrategyState
from isotrain.core.data.streaming.stream_state import StreamState
from isotrain.core.errors import CheckpointError, IsotrainError
from isotrain.core.session.checkpointing.state_snapshot import (
    PendingCopy,
    StateSnapshot,
    finish_copies,
    finished_copy,
)
from isotrain.core.session.training.consensus import Consensus
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.weight_average import WeightAverage
from isotrain.core.session.weights.weights_file import AVERAGE

FORMAT = 1
SHARDS = "shards"
"""The section with stream states of the processes that read shards which rank 0 may not read."""
_POLL_SECONDS = 1.0
_COMMIT_SECONDS = 600.0
"""Time for which rank 0 waits for the files of the other processes."""
_WRITTEN, _FAILED, _HANGS = 0, 1, 2
"""State of a checkpoint; the worst of all processes counts."""


@dataclass(frozen=True)
class SavedTrainerState:
    """The trainer state in a checkpoint's `run.json`.

    Attributes:
        step: Number of steps done.
        rate_factor: Factor on the learning rates, from `scale_learning_rate`.
        epoch_loss: Sum of the losses of the epoch so far, each times its samples.
        epoch_samples: Number of samples of the epoch so far.
        best_steps: Steps of the checkpoints that were the best when saved, ascending; the last is the best.
        last_loss: Loss of the last step; None before the first.
        is_finished: Whether the strategy has finished its work after the last step.
        notes: `session.notes`.
        stream_state: State of the data stream after the last step, if the stream can be resumed from a state.
        rates: Learning rates of the last step and, by the spec of that run, of the next one.
        fixed_rate: Learning rate from `set_learning_rate`; None for the spec's.
        plateau_fractions: Fractions of the spec's rates that the schedule `plateau` has left, by update.
        skipped_steps: Number of steps left out by `on_nan: skip`.
        skipped_in_a_row: Number of these since the last one that was not left out, by update.
        averaged: Number of weights in their average over steps (`ema`, `swa`); 0 where there is none.
        values: Scalars that objectives got in the last step, by name.
        frozen: Sorted names of the weights that `session.freeze` has frozen.
    """

    step: int
    rate_factor: float = 1.0
    epoch_loss: float = 0.0
    epoch_samples: int = 0
    best_steps: list[int] = field(default_factory=list)
    last_loss: float | None = None
    is_finished: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    stream_state: StreamState | None = None
    rates: list[float] = field(default_factory=list)
    fixed_rate: float | None = None
    plateau_fractions: dict[str, float] = field(default_factory=dict)
    skipped_steps: int = 0
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)
    averaged: int = 0
    values: dict[str, float] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint; None where none was saved as the best."""
        return self.best_steps[-1] if self.best_steps else None


@dataclass(frozen=True)
class RunIdentity:
    """The run that saved a checkpoint, as `run.json` describes it; a resume compares it with its own.

    Attributes:
        spec: Training spec, as in `spec.json`.
        plan: Plan, as in `plan.json`.
        versions: Versions of the packages that took part, by name.
        replicas_differ: Whether each replica has weights of its own.
    """

    spec: dict[str, Any]
    plan: dict[str, Any]
    versions: dict[str, str]
    replicas_differ: bool


class CheckpointWriter:
    """Writes one process's part of the checkpoints of a run. Collective.

    State is copied at once, or during the next step, whose update waits for the copy; a background thread
    writes it. Processes agree on the outcome by all-reduce before the next checkpoint.
    """

    def __init__(
        self,
        folder: CheckpointFolder | None,
        session_context: SessionContext,
        reporter: Reporter,
        average: WeightAverage,
    ) -> None:
        """Prepares the snapshots; saves nothing yet.

        Args:
            folder: The run's folder of checkpoints; None where it has none.
            session_context: Context of the session whose state is saved.
            reporter: Sends events to the launcher.
            average: Average of the weights, which is saved beside them.
        """
        self._average = average
        self._folder = folder
        self._session_context = session_context
        self._spec = session_context.spec
        self._plan = session_context.plan
        self._group = session_context.group
        self._strategy = session_context.strategy
        self._reporter = reporter
        self._snapshot = StateSnapshot(session_context, reporter.rank)
        self._consensus = Consensus(self._group)
        self._is_requested = False
        self._token: str | None = None
        self._count = 0
        self._thread: threading.Thread | None = None
        self._written = threading.Event()
        self._given_up = threading.Event()
        self._error: Exception | None = None
        self._warning: Warned | None = None
        """Warning about `_error`, until one process has sent it."""
        self._hangs = False
        """Whether writing the last checkpoint took too long: later saves do not wait for it again."""
        self._saved: SavedTrainerState | None = None
        self._saved_at = self._began_at = time.monotonic()

    def poll_requests(self, step: int) -> CheckpointRequest:
        """Requests by signals or by `every_minutes`, the same on all processes after the same step.

        A request takes about a second to reach all processes.
        """
        request = self._reporter.checkpoint_request
        self._is_requested |= request.save
        save = self._is_requested or self._is_interval_over()
        agreed = self._consensus.all_reduce_requests(
            step, CheckpointRequest(save=save, end=request.end)
        )
        self._is_requested &= not agreed.save
        return agreed

    def _is_interval_over(self) -> bool:
        """Whether `every_minutes` have passed since the last checkpoint, by the clock of rank 0."""
        policy = self._spec.checkpoint
        minutes = None if policy is None else policy.every_minutes
        if minutes is None or self._reporter.rank:
            return False
        return time.monotonic() - self._saved_at >= 60 * minutes

    def is_due(self, step: int, steps_per_epoch: int) -> bool:
        """Whether the spec's `every_steps` or `every_epochs` asks for a checkpoint after this step."""
        policy = self._spec.checkpoint
        if policy is None:
            return False
        epochs, rest = divmod(step, steps_per_epoch)
        return _divides(policy.every_steps, step) or (
            rest == 0 and _divides(policy.every_epochs, epochs)
        )

    @property
    def run_folder(self) -> CheckpointFolder:
        """The run's folder of checkpoints.

        Raises:
            IsotrainError: The session has none.
        """
        if self._folder is None:
            raise IsotrainError(
                "this session was opened without a run directory: pass the folder of the checkpoints, or"
                " set `checkpoint.folder` in the spec."
            )
        return self._folder

    def save_once(
        self,
        trainer_state: SavedTrainerState,
        overlap_next_step: bool,
        may_skip: bool,
        is_outdated: bool,
    ) -> bool:
        """Begins to save a checkpoint, unless the same step is saved already with the same notes.

        Args:
            trainer_state: Trainer state to save.
            overlap_next_step: Whether the copy may be finished during the next step.
            may_skip: Whether to skip this checkpoint if the last one is still being written after
                `timeouts.silence`.
            is_outdated: Whether the last step has had another update since it was saved.

        Returns:
            False if the checkpoint was skipped.
        """
        timeout_s = 0.0 if self._hangs else self._plan.timeouts["silence"]
        state = self._agreed_state(timeout_s if may_skip else math.inf)
        self._hangs = state == _HANGS
        if self._hangs:
            self._warn_skipped(trainer_state.step)
            return False
        self._take_error(state)
        saved = self._saved
        if (
            saved is None
            or is_outdated
            or (trainer_state.step, trainer_state.best_steps) != (saved.step, saved.best_steps)
            or self._consensus.any_process(trainer_state.notes != saved.notes)
        ):
            self._begin(trainer_state, None, overlap_next_step)
        return True

    def _warn_skipped(self, step: int) -> None:
        assert self._saved is not None
        before, seconds = self._saved.step, time.monotonic() - self._began_at
        self._saved_at = time.monotonic()
        if self._reporter.rank == 0:
            text = f"that of step {before} is still being written, after {seconds:.0f} s"
            self._reporter.emit(Warned(text=f"the checkpoint of step {step} is left out: {text}."))

    def save(
        self, trainer_state: SavedTrainerState, folder: CheckpointFolder | None = None
    ) -> None:
        """Copies the state, and begins to write it to a folder of checkpoints; None for the run's."""
        self.wait()
        self._begin(trainer_state, folder, overlap_next_step=False)

    def _begin(
        self,
        trainer_state: SavedTrainerState,
        other_folder: CheckpointFolder | None,
        overlap_next_step: bool,
    ) -> None:
        folder = other_folder or self.run_folder
        differ = self._replicas_differ(trainer_state.is_finished)
        strategy_state = self._strategy.state(self._group)
        if self._token is None:
            self._token = self._consensus.shared_token()
        self._count += 1
        run = (
            None if self._reporter.rank else self.run_record(trainer_state, differ, strategy_state)
        )
        if other_folder is None:
            self._saved, self._saved_at = deepcopy(trainer_state), time.monotonic()
        self._began_at = time.monotonic()
        self._written.clear()
        self._given_up.clear()
        average: dict[str, PendingCopy] = {}
        if self._average.count and self._snapshot.has_weights_to_write:
            with self._average.applied(self._group):
                average[AVERAGE] = finished_copy(self._snapshot.weights())
        copies = average | self._shard_states(trainer_state.stream_state)
        copies |= self._snapshot.begin_copies(differ, strategy_state)
        if not overlap_next_step:
            copies = {
                name: finished_copy(section) for name, section in finish_copies(copies).items()
            }
        self._thread = threading.Thread(
            target=self._write,
            args=(folder, trainer_state, copies, run),
            name="isotrain-checkpoint",
        )
        self._thread.start()

    def _shard_states(self, stream_state: StreamState | None) -> dict[str, PendingCopy]:
        """The section with this process's states of shards, as JSON; empty where rank 0 has the same."""
        if stream_state is None or not self._session_context.loaders.reads_shards:
            return {}
        text = json.dumps(asdict(stream_state)).encode()
        part = TensorPart(np.frombuffer(text, np.uint8))
        return {SHARDS: finished_copy({f"rank-{self._reporter.rank}": part})}

    def last_of(self, steps: Sequence[int]) -> Checkpoint:
        """The checkpoint of the last of these steps that has a complete one.

        Raises:
            CheckpointError: No step has one.
        """
        complete = {each.step: each for each in self.run_folder.complete()}
        checkpoints = [complete[step] for step in steps if step in complete]
        if not checkpoints:
            raise CheckpointError(f"{self.run_folder.location} has no checkpoint of {steps}.")
        return checkpoints[-1]

    def note_restored(self, checkpoint: Checkpoint, trainer_state: SavedTrainerState) -> bool:
        """Remembers which checkpoint was restored; returns whether it is in the run's own folder."""
        location = None if self._folder is None else self._folder.location.rstrip("/")
        is_from_this_run = location is not None and checkpoint.location.startswith(f"{location}/")
        self._saved = deepcopy(trainer_state) if is_from_this_run else None
        return is_from_this_run

    def wait(self) -> str | None:
        """Waits until all processes have written the last checkpoint; returns why it is not complete."""
        return self._take_error(self._agreed_state(math.inf))

    def give_up(self) -> None:
        """Leaves the checkpoint that is being written incomplete: one of its writers is lost. Local."""
        self._given_up.set()

    def _agreed_state(self, timeout_s: float) -> int:
        """State of the last checkpoint, after at most `timeout_s` each for writing and for committing."""
        if self._thread is None:
            return _WRITTEN
        state = self._all_reduce_state(self._wait_until(self._written.wait, timeout_s))
        if state == _HANGS:
            return state
        if state == _FAILED:
            self._given_up.set()
        return self._all_reduce_state(self._wait_until(self._has_ended, timeout_s))

    def _all_reduce_state(self, is_over: bool) -> int:
        """The worst state of all processes; of those that failed, the lowest rank sends its warning."""
        most, rank = len(self._plan.processes), self._reporter.rank
        failed = 0 if self._error is None else most - rank
        worst = self._consensus.all_reduce_max(failed if is_over else most + 1)
        if worst > most:
            return _HANGS
        if self._warning is not None and worst == most - rank:
            self._reporter.emit(self._warning)
            self._warning = None
        return _FAILED if worst else _WRITTEN

    def _take_error(self, state: int) -> str | None:
        """Resets the writer for the next checkpoint; returns why the last one failed, None if it did not."""
        self._thread, self._warning, self._hangs = None, None, False
        error, self._error = self._error, None
        if state == _WRITTEN:
            return None
        self._saved = None
        return str(error) if error is not None else "another process could not write its part"

    def _wait_until(self, is_over: Callable[[float], bool], timeout_s: float) -> bool:
        """Waits, and keeps reporting the present call to the launcher: a bucket may be slow."""
        deadline = time.monotonic() + timeout_s
        while not is_over(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
            self._reporter.enter(self._reporter.call)
        return True

    def _has_ended(self, timeout_s: float) -> bool:
        assert self._thread is not None
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _replicas_differ(self, is_finished: bool) -> bool:
        keeps_equal = self._strategy.keeps_replicas_equal
        are_equal = keeps_equal == "always" or (keeps_equal == "finally" and is_finished)
        return not are_equal and not self._plan.uses_parameter_server and self._group.replicas > 1

    def run_record(
        self, trainer_state: SavedTrainerState, differ: bool, strategy_state: StrategyState
    ) -> dict[str, Any]:
        """The content of `run.json`."""
        versions = self._session_context.versions()
        identity = RunIdentity(self._spec.to_dict(), self._plan.to_dict(), versions, differ)
        return {
            "format": FORMAT,
            "trainer_state": asdict(trainer_state),
            **asdict(identity),
            "strategy_values": dict(strategy_state.values),
        }

    def _write(
        self,
        folder: CheckpointFolder,
        trainer_state: SavedTrainerState,
        copies: Mapping[str, PendingCopy],
        run: dict[str, Any] | None,
    ) -> None:
        """Finishes the copies and writes them, on a thread; training goes on if it fails."""
        token, rank, step = f"{self._token}-{self._count}", self._reporter.rank, trainer_state.step
        try:
            folder.write(step, token=token, writer=rank, sections=finish_copies(copies))
            self._written.set()
            if run is not None:
                self._commit(folder, trainer_state, token, run)
        except Exception as error:  # a full disk, a bucket that is gone
            warning = _not_saved(folder, step, error)
            if rank:  # others may have failed too
                self._warning = warning
            elif not self._given_up.is_set():  # else the process that failed sends its warning
                self._reporter.emit(warning)
            self._error = error
            self._written.set()

    def _commit(
        self,
        folder: CheckpointFolder,
        trainer_state: SavedTrainerState,
        token: str,
        run: dict[str, Any],
    ) -> None:
        """Commits the checkpoint once all processes have written their files; on rank 0."""
        writers = sum(process.has_session for process in self._plan.processes)
        step = trainer_state.step
        saved = folder.commit(
            step,
            token=token,
            writers=writers,
            run=run,
            timeout_s=_COMMIT_SECONDS,
            given_up=self._given_up.is_set,
        )
        is_best = trainer_state.best_step == step
        self._reporter.emit(CheckpointSaved(done=step, location=saved.location, best=is_best))
        if folder is self._folder:
            self._prune(folder, trainer_state)

    def _prune(self, folder: CheckpointFolder, trainer_state: SavedTrainerState) -> None:
        """Removes older checkpoints than `keep_last`, except the best one that is complete."""
        policy = self._spec.checkpoint
        if policy is None or policy.keep_last is None:
            return
        try:
            complete = {each.step for each in folder.complete()}
            best = [step for step in trainer_state.best_steps if step in complete][-1:]
            folder.prune(keep_last=policy.keep_last, keep=best)
        except IsotrainError as error:
            self._reporter.emit(Warned(text=f"older checkpoints were not removed: {error}"))


def _not_saved(folder: CheckpointFolder, step: int, error: Exception) -> Warned:
    text = str(error) if isinstance(error, IsotrainError) else f"{type(error).__name__}: {error}"
    previous = "Whether there is one before it cannot be seen."
    with contextlib.suppress(IsotrainError):
        newest = folder.newest()
        previous = "There is none before it."
        if newest is not None:
            previous = f"The one before it stays: {newest.location}."
    return Warned(text=f"the checkpoint of step {step} was not saved. {previous} {text}")


def _divides(interval: int | None, count: int) -> bool:
    return interval is not None and count > 0 and count % interval == 0
