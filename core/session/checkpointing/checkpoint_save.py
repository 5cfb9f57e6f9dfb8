"""Saving checkpoints while training goes on: when they are due, and the writing."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.contracts.events import CheckpointSaved, Warned
from isotrain.core.contracts.process import runs_the_loop
from isotrain.core.contracts.reporter import CheckpointRequest, Reporter
from isotrain.core.contracts.strategy import StrategyState
from isotrain.core.data.stream_state import StreamState
from isotrain.core.errors import CheckpointError, IsotrainError
from isotrain.core.session.checkpointing.state_snapshot import (
    PendingCopy,
    StateSnapshot,
    finish_copies,
    finished_copy,
)
from isotrain.core.session.training.consensus import Consensus
from isotrain.core.session.training.context import SessionContext

FORMAT = 1
_LOOK_SECONDS = 1.0
_COMMIT_SECONDS = 600.0
"""How long rank 0 waits for the files of the other processes."""
_WRITTEN, _FAILED, _HANGS = 0, 1, 2
"""How a checkpoint stands; the worst of all processes counts."""


@dataclass(frozen=True)
class SavedTrainerState:
    """Where a run is, as its checkpoints say.

    Attributes:
        step: Steps done.
        rate_factor: What `scale_learning_rate` has made of the rates.
        epoch_loss: The sum of the losses of the epoch so far, each times its samples.
        epoch_samples: Of these steps.
        best_steps: Of the checkpoints that were each the best so far; the last is the best.
        last_loss: Of the last step; None before the first.
        is_finished: Whether the strategy has done all that it had to do.
        notes: `session.notes`.
        mark: To which place the stream of data can be taken back, if it has a state of its own.
        rates: Learning rates of the last step and, by the spec of that run, of the next one.
    """

    step: int
    rate_factor: float = 1.0
    epoch_loss: float = 0.0
    epoch_samples: int = 0
    best_steps: list[int] = field(default_factory=list)
    last_loss: float | None = None
    is_finished: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    mark: StreamState | None = None
    rates: list[float] = field(default_factory=list)

    @property
    def best_step(self) -> int | None:
        """Of the best checkpoint; None where none was called so."""
        return self.best_steps[-1] if self.best_steps else None


@dataclass(frozen=True)
class RunIdentity:
    """Whose checkpoints they are: what a resume compares, and a person wants to know.

    Attributes:
        spec: As `spec.json` has it.
        plan: As `plan.json` has it.
        versions: Of the packages that took part.
        replicas_differ: Whether each replica's weights are its own.
    """

    spec: dict[str, Any]
    plan: dict[str, Any]
    versions: dict[str, str]
    replicas_differ: bool


class CheckpointWriter:
    """Saves the checkpoints of one process's share of a run.

    Every process calls every method at the same point. A checkpoint is copied at once, or beside the next
    step, whose update waits for it; a thread of its own writes it.
    """

    def __init__(
        self, folder: CheckpointFolder | None, session_context: SessionContext, reporter: Reporter
    ) -> None:
        """Saves nothing yet.

        Args:
            folder: Where the run's own checkpoints lie; None: nowhere.
            session_context: Whose state is saved.
            reporter: Tells the launcher.
        """
        self._folder = folder
        self._session_context = session_context
        self._spec = session_context.spec
        self._plan = session_context.plan
        self._group = session_context.group
        self._strategy = session_context.strategy
        self._reporter = reporter
        self._copies = StateSnapshot(session_context, reporter.rank)
        self._agreement = Consensus(self._group)
        self._is_asked = False
        self._token: str | None = None
        self._count = 0
        self._writing: threading.Thread | None = None
        self._written = threading.Event()
        self._given_up = threading.Event()
        self._fault: Exception | None = None
        self._warning: Warned | None = None
        """Of the fault, until one process has told of it."""
        self._hangs = False
        """Whether the last one was found to take too long: none is left that waits for it."""
        self._saved: SavedTrainerState | None = None
        self._saved_at = self._began_at = time.monotonic()

    def poll_requests(self, step: int) -> CheckpointRequest:
        """What all processes wish after this step, besides what its number says.

        It is a second or so until they know.
        """
        asked = self._reporter.checkpoint_request
        self._is_asked |= asked.save
        own = CheckpointRequest(save=self._is_asked or self._minutes_are_over(), end=asked.end)
        found = self._agreement.all_reduce_requests(step, own)
        self._is_asked &= not found.save
        return found

    def _minutes_are_over(self) -> bool:
        """Whether the clock of rank 0 asks for a checkpoint."""
        policy = self._spec.checkpoint
        minutes = None if policy is None else policy.every_minutes
        if minutes is None or self._reporter.rank:
            return False
        return time.monotonic() - self._saved_at >= 60 * minutes

    def is_due(self, step: int, steps_per_epoch: int) -> bool:
        """Whether the spec asks for a checkpoint after so many steps."""
        policy = self._spec.checkpoint
        if policy is None:
            return False
        epochs, rest = divmod(step, steps_per_epoch)
        return _divides(policy.every_steps, step) or (
            rest == 0 and _divides(policy.every_epochs, epochs)
        )

    @property
    def run_folder(self) -> CheckpointFolder:
        """Where the run's own checkpoints lie.

        Raises:
            IsotrainError: Nowhere.
        """
        if self._folder is None:
            raise IsotrainError(
                "this session was opened without a run directory: say which folder the checkpoints are in, or"
                " set `checkpoint.folder` in the spec."
            )
        return self._folder

    def save_once(
        self, position: SavedTrainerState, overlap_next_step: bool, may_skip: bool
    ) -> bool:
        """As `save`; a step that is saved already is not, unless there is more to say of it now.

        Args:
            position: Where the run is.
            overlap_next_step: Whether the copy may be finished beside the next step.
            may_skip: Whether it need not be saved where the one before is still being written
                after `timeouts.silence`.

        Returns:
            False where it was left out.
        """
        patience = 0.0 if self._hangs else self._plan.timeouts["silence"]
        state = self._state(patience if may_skip else math.inf)
        self._hangs = state == _HANGS
        if self._hangs:
            self._leave_out(position.step)
            return False
        self._take_fault(state)
        saved = self._saved
        if (
            saved is None
            or (position.step, position.best_steps) != (saved.step, saved.best_steps)
            or self._agreement.any_process(position.notes != saved.notes)
        ):
            self._begin(position, None, overlap_next_step)
        return True

    def _leave_out(self, step: int) -> None:
        assert self._saved is not None
        before, seconds = self._saved.step, time.monotonic() - self._began_at
        self._saved_at = time.monotonic()
        if self._reporter.rank == 0:
            text = f"that of step {before} is still being written, after {seconds:.0f} s"
            self._reporter.emit(Warned(text=f"the checkpoint of step {step} is left out: {text}."))

    def save(self, position: SavedTrainerState, elsewhere: CheckpointFolder | None = None) -> None:
        """Copies the state, and begins to write it.

        Args:
            position: Where the run is.
            elsewhere: Another folder than the run's own.
        """
        self.wait()
        self._begin(position, elsewhere, overlap_next_step=False)

    def _begin(
        self,
        position: SavedTrainerState,
        elsewhere: CheckpointFolder | None,
        overlap_next_step: bool,
    ) -> None:
        folder = elsewhere or self.run_folder
        differ = self._replicas_differ(position.is_finished)
        kept = self._strategy.state(self._group)
        if self._token is None:
            self._token = self._agreement.shared_token()
        self._count += 1
        run = None if self._reporter.rank else self._run(position, differ, kept)
        if elsewhere is None:
            self._saved, self._saved_at = deepcopy(position), time.monotonic()
        self._began_at = time.monotonic()
        self._written.clear()
        self._given_up.clear()
        copies = self._copies.begin_copies(differ, kept)
        if not overlap_next_step:
            copies = {
                name: finished_copy(section) for name, section in finish_copies(copies).items()
            }
        self._writing = threading.Thread(
            target=self._write, args=(folder, position, copies, run), name="isotrain-checkpoint"
        )
        self._writing.start()

    def last_of(self, steps: Sequence[int]) -> Checkpoint:
        """The checkpoint of the last of these steps that has one.

        Raises:
            CheckpointError: None has.
        """
        there = {each.step: each for each in self.run_folder.complete()}
        found = [there[step] for step in steps if step in there]
        if not found:
            raise CheckpointError(f"{self.run_folder.location} has no checkpoint of {steps}.")
        return found[-1]

    def restored_from(self, checkpoint: Checkpoint, position: SavedTrainerState) -> bool:
        """Notes that the run is where a checkpoint is; says whether that is one of its own."""
        own = None if self._folder is None else self._folder.location.rstrip("/")
        is_own = own is not None and checkpoint.location.startswith(f"{own}/")
        self._saved = deepcopy(position) if is_own else None
        return is_own

    def wait(self) -> str | None:
        """Returns once the last checkpoint is written by all; says on every process if it was not."""
        return self._take_fault(self._state(math.inf))

    def _state(self, patience: float) -> int:
        """How the last checkpoint stands, after so many seconds at most for each of two parts."""
        if self._writing is None:
            return _WRITTEN
        state = self._agreed(self._until(self._written.wait, patience))
        if state == _HANGS:
            return state
        if state == _FAILED:
            self._given_up.set()
        return self._agreed(self._until(self._has_ended, patience))

    def _agreed(self, is_over: bool) -> int:
        """Of those that failed, the one with the lowest rank tells why."""
        most, rank = len(self._plan.processes), self._reporter.rank
        failed = 0 if self._fault is None else most - rank
        worst = self._agreement.all_reduce_max(failed if is_over else most + 1)
        if worst > most:
            return _HANGS
        if self._warning is not None and worst == most - rank:
            self._reporter.emit(self._warning)
            self._warning = None
        return _FAILED if worst else _WRITTEN

    def _take_fault(self, state: int) -> str | None:
        """Makes room for the next one; says what was wrong with the last."""
        self._writing, self._warning, self._hangs = None, None, False
        fault, self._fault = self._fault, None
        if state == _WRITTEN:
            return None
        self._saved = None
        return str(fault) if fault is not None else "another process could not write its share"

    def _until(self, is_over: Callable[[float], bool], patience: float) -> bool:
        """Waits, and lets the launcher know that it does: a bucket may be slow."""
        deadline = time.monotonic() + patience
        while not is_over(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
            self._reporter.enter(self._reporter.call)
        return True

    def _has_ended(self, seconds: float) -> bool:
        assert self._writing is not None
        self._writing.join(seconds)
        return not self._writing.is_alive()

    def _replicas_differ(self, finished: bool) -> bool:
        promised = self._strategy.keeps_replicas_equal
        equal = promised == "always" or (promised == "finally" and finished)
        return not equal and not self._plan.uses_parameter_server and self._group.replicas > 1

    def _run(
        self, position: SavedTrainerState, differ: bool, kept: StrategyState
    ) -> dict[str, Any]:
        """What `run.json` holds."""
        versions = self._session_context.versions()
        identity = RunIdentity(self._spec.to_dict(), self._plan.to_dict(), versions, differ)
        return {
            "format": FORMAT,
            "trainer_state": asdict(position),
            **asdict(identity),
            "strategy_values": dict(kept.values),
        }

    def _write(
        self,
        folder: CheckpointFolder,
        position: SavedTrainerState,
        copies: Mapping[str, PendingCopy],
        run: dict[str, Any] | None,
    ) -> None:
        """Does the copying that is left and the writing, on a thread; training goes on when it fails."""
        token, rank = f"{self._token}-{self._count}", self._reporter.rank
        try:
            folder.write(position.step, token=token, writer=rank, sections=finish_copies(copies))
            self._written.set()
            if run is not None:
                self._complete(folder, position, token, run)
        except Exception as error:  # a full disk, a bucket that is gone
            told = _not_saved(folder, position.step, error)
            if rank:  # others may have failed too
                self._warning = told
            elif not self._given_up.is_set():  # else who failed tells
                self._reporter.emit(told)
            self._fault = error
            self._written.set()

    def _complete(
        self, folder: CheckpointFolder, position: SavedTrainerState, token: str, run: dict[str, Any]
    ) -> None:
        """Makes the checkpoint whole when all have written; by rank 0."""
        writers = sum(runs_the_loop(process.role) for process in self._plan.processes)
        step = position.step
        saved = folder.commit(
            step,
            token=token,
            writers=writers,
            run=run,
            timeout_s=_COMMIT_SECONDS,
            given_up=self._given_up.is_set,
        )
        is_best = position.best_step == step
        self._reporter.emit(CheckpointSaved(done=step, location=saved.location, best=is_best))
        if folder is self._folder:
            self._prune(folder, position)

    def _prune(self, folder: CheckpointFolder, position: SavedTrainerState) -> None:
        """Removes what the spec does not keep; the best that was written stays until a better one is."""
        policy = self._spec.checkpoint
        if policy is None or policy.keep_last is None:
            return
        try:
            there = {each.step for each in folder.complete()}
            best = [step for step in position.best_steps if step in there][-1:]
            folder.prune(keep_last=policy.keep_last, keep=best)
        except IsotrainError as error:
            self._reporter.emit(Warned(text=f"older checkpoints were not removed: {error}"))


def _not_saved(folder: CheckpointFolder, step: int, error: Exception) -> Warned:
    text = str(error) if isinstance(error, IsotrainError) else f"{type(error).__name__}: {error}"
    held = "Whether there is one before it cannot be seen."
    with contextlib.suppress(IsotrainError):
        before = folder.newest()
        held = "There is none before it."
        if before is not None:
            held = f"The one before it stays: {before.location}."
    return Warned(text=f"the checkpoint of step {step} was not saved. {held} {text}")


def _divides(interval: int | None, count: int) -> bool:
    return interval is not None and count > 0 and count % interval == 0
