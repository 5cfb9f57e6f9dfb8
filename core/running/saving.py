"""Saving checkpoints while training goes on: what they hold, when they are due, and the writing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.parts import Section, TensorPart
from isotrain.core.contracts.events import CheckpointSaved, Warned
from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import runs_the_loop
from isotrain.core.contracts.reporter import Reporter, Wishes
from isotrain.core.contracts.state import MODEL_STATE, StateKind
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.contracts.strategy_state import StrategyState
from isotrain.core.errors import CheckpointError, IsotrainError
from isotrain.core.running.agreement import Agreement
from isotrain.core.spec.training_spec import TrainingSpec

FORMAT = 1
SHARED_STATE: tuple[StateKind, ...] = (*MODEL_STATE, "loss-scale")
"""What is equal on replicas whose weights are."""
OWN_STATE: tuple[StateKind, ...] = ("random", "metrics", "exchange")
"""What each replica has for itself."""
_COMMIT_SECONDS = 600.0
"""How long rank 0 waits for the files of the other processes."""


@dataclass(frozen=True)
class Position:
    """Where a run is, as its checkpoints say.

    Attributes:
        step: Steps done.
        rate_factor: What `scale_learning_rate` has made of the rates.
        epoch_loss: The sum of the losses of the epoch so far, each times its samples.
        epoch_samples: Of these steps.
        best_step: Of the best checkpoint so far.
        last_loss: Of the last step; None before the first.
        is_finished: Whether the strategy has done all that it had to do.
        notes: `session.notes`.
    """

    step: int
    rate_factor: float = 1.0
    epoch_loss: float = 0.0
    epoch_samples: int = 0
    best_step: int | None = None
    last_loss: float | None = None
    is_finished: bool = False
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Identity:
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


class Saver:
    """Saves the checkpoints of one process's share of a run.

    Every process calls every method at the same point. A checkpoint is copied from the devices at once,
    and written by a thread of its own.

    """

    def __init__(
        self,
        folder: CheckpointFolder | None,
        spec: TrainingSpec,
        plan: Plan,
        group: ReplicaGroup,
        strategy: Strategy,
        reporter: Reporter,
        versions: Callable[[], dict[str, str]],
    ) -> None:
        self._folder = folder
        self._spec = spec
        self._plan = plan
        self._group = group
        self._strategy = strategy
        self._reporter = reporter
        self._versions = versions
        self._agreement = Agreement(group)
        self._token: str | None = None
        self._count = 0
        self._writing: threading.Thread | None = None
        self._written = threading.Event()
        self._given_up = threading.Event()
        self._fault: Exception | None = None
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()

    def wishes(self, step: int) -> Wishes:
        """What all processes wish after this step, besides what its number says.

        It is a second or so until they know.
        """
        asked = self._reporter.wishes
        own = Wishes(save=asked.save or self._minutes_are_over(), end=asked.end)
        found = self._agreement.reach(step, own)
        if found.save:
            self._reporter.wish_granted()
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
    def own_folder(self) -> CheckpointFolder:
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

    def save(self, position: Position, elsewhere: CheckpointFolder | None = None) -> None:
        """Copies the state, and begins to write it; what is written already is not written again.

        Args:
            position: Where the run is.
            elsewhere: Another folder than the run's own.
        """
        if elsewhere is None and position.step == self._saved_step:
            return
        folder = elsewhere or self.own_folder
        self.wait()
        differ = self._replicas_differ(position.is_finished)
        kept = self._strategy.state(self._group)
        sections = self._sections(differ, kept)
        if self._token is None:
            self._token = self._agreement.token()
        self._count += 1
        run = None if self._reporter.rank else self._run(position, differ, kept)
        if elsewhere is None:
            self._saved_step, self._saved_at = position.step, time.monotonic()
        self._written.clear()
        self._given_up.clear()
        self._writing = threading.Thread(
            target=self._write, args=(folder, position, sections, run), name="isotrain-checkpoint"
        )
        self._writing.start()

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of a step.

        Raises:
            CheckpointError: It is not there.
        """
        found = (each for each in self.own_folder.complete() if each.step == step)
        checkpoint = next(found, None)
        if checkpoint is None:
            raise CheckpointError(f"{self.own_folder.location} has no checkpoint of step {step}.")
        return checkpoint

    def began_at(self, step: int) -> None:
        """Notes that the checkpoint of this step is there already."""
        self._saved_step = step

    def wait(self) -> Exception | None:
        """Returns once the last checkpoint is written by all; gives what went wrong here."""
        if self._writing is not None:
            self._written.wait()
            if self._agreement.holds_anywhere(self._fault is not None):
                self._given_up.set()
            self._writing.join()
            self._writing = None
        fault, self._fault = self._fault, None
        return fault

    def _replicas_differ(self, finished: bool) -> bool:
        promised = self._strategy.keeps_replicas_equal
        equal = promised == "always" or (promised == "finally" and finished)
        return not equal and not self._plan.is_served and self._group.replicas > 1

    def _sections(self, differ: bool, kept: StrategyState) -> dict[str, Section]:
        group, sections = self._group, dict[str, Section]()
        kinds = (*SHARED_STATE, *OWN_STATE) if differ else OWN_STATE
        if not differ and not self._reporter.rank:
            sections["state"] = _parts(group, SHARED_STATE, None)
        for replica in group.local_replicas:
            sections[f"replica-{replica}"] = _parts(group, kinds, replica)
        if not self._reporter.rank:
            sections["strategy"] = _as_parts(kept.tensors)
        for replica, tensors in kept.of_replicas.items():
            sections[f"strategy-{replica}"] = _as_parts(tensors)
        return {name: section for name, section in sections.items() if section}

    def _run(self, position: Position, differ: bool, kept: StrategyState) -> dict[str, Any]:
        """What `run.json` holds."""
        identity = Identity(self._spec.to_dict(), self._plan.to_dict(), self._versions(), differ)
        return {
            "format": FORMAT,
            "position": asdict(position),
            **asdict(identity),
            "strategy_values": dict(kept.values),
        }

    def _write(
        self,
        folder: CheckpointFolder,
        position: Position,
        sections: Mapping[str, Section],
        run: dict[str, Any] | None,
    ) -> None:
        """Does the writing, on a thread; training goes on when it fails."""
        token, rank = f"{self._token}-{self._count}", self._reporter.rank
        try:
            folder.write(position.step, token=token, writer=rank, sections=sections)
            self._written.set()
            if run is not None:
                self._complete(folder, position, token, run)
        except Exception as error:  # a full disk, a bucket that is gone
            self._fault = error
            self._written.set()
            self._warn(folder, position.step, error)

    def _complete(
        self, folder: CheckpointFolder, position: Position, token: str, run: dict[str, Any]
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
        policy = self._spec.checkpoint
        if folder is self._folder and policy is not None and policy.keep_last is not None:
            best = () if position.best_step is None else (position.best_step,)
            folder.prune(keep_last=policy.keep_last, keep=best)
        is_best = position.best_step == step
        self._reporter.emit(CheckpointSaved(done=step, location=saved.location, best=is_best))

    def _warn(self, folder: CheckpointFolder, step: int, error: Exception) -> None:
        known = isinstance(error, IsotrainError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        held = "There is none before it."
        with contextlib.suppress(IsotrainError):
            before = folder.newest()
            held = held if before is None else f"The one before it stays: {before.location}."
        self._reporter.emit(
            Warned(text=f"the checkpoint of step {step} was not saved. {held} {text}")
        )


def _divides(interval: int | None, count: int) -> bool:
    return interval is not None and count > 0 and count % interval == 0


def _parts(
    group: ReplicaGroup, kinds: tuple[StateKind, ...], replica: int | None
) -> dict[str, TensorPart]:
    described = group.describe_state(kinds, replica=replica)
    return {
        name: TensorPart(array, described[name].dtype)
        for name, array in group.read_state(kinds, replica=replica).items()
    }


def _as_parts(tensors: Mapping[str, Any]) -> dict[str, TensorPart]:
    return {name: TensorPart(array) for name, array in tensors.items()}
