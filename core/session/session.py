"""What a person with their own loop holds: one process's view of a run, the same under every backend."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from isotrain.core.contracts.events import EpochEnded
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import ProcessContext, ServerConnection
from isotrain.core.contracts.replica import Tensor
from isotrain.core.contracts.reporter import BETWEEN_CALLS, CLOSE, Reporter
from isotrain.core.contracts.state import MODEL_STATE, StateKind
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.data.batch import Batch
from isotrain.core.errors import IsotrainError
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.checkpointer import Checkpointer
from isotrain.core.session.training.context import build_session_context, setup_notes, state_notes
from isotrain.core.session.training.evaluation import Evaluator
from isotrain.core.session.training.predictions import concatenated
from isotrain.core.session.training.timers import Stopwatch
from isotrain.core.session.training.train_step import TrainLoop


class Session:
    """Trains and evaluates, on every process of the run alike.

    Every method but the properties is called by every process at the same point. Nothing can be set that
    is not there.

    Attributes:
        spec: What is trained.
        plan: How, completed with the numbers of samples and parameters.
        group: The replicas of this process.
        rank: Of this process.
        run_directory: Where the run keeps its files.
        initial_weights: What became of those that the spec names; None where it names none.
        notes: JSON values of your own loop, which every checkpoint holds, those of rank 0; `restore` brings
            them back on every process.
    """

    _is_open = False

    def __init__(
        self,
        cast: ResolvedSpec,
        plan: Plan,
        context: ProcessContext,
        reporter: Reporter,
        server_connection: ServerConnection | None = None,
        *,
        resumes: bool = False,
    ) -> None:
        """Loads the data, builds the model and joins the other processes.

        Args:
            cast: What is trained, and what takes part.
            plan: How.
            context: This process's place.
            reporter: Tells the launcher.
            server_connection: This process's part in a parameter-server run; needed there only.
            resumes: Whether `restore` is called next: initial weights are not read then.
        """
        self.stopwatch = Stopwatch()
        self._session_context = own = build_session_context(
            cast, plan, context, reporter, server_connection, resumes=resumes
        )
        self.spec = cast.spec
        self.plan = own.plan
        self.group = own.group
        self.rank = context.rank
        self.run_directory = Path(context.run_directory)
        self.initial_weights = own.initial_weights
        self.notes: dict[str, Any] = {}
        self._reporter = reporter
        self._training = training = TrainLoop(own, reporter, self.stopwatch)
        self._trainer_state, self._step_logger = training.trainer_state, training.step_logger
        self._evaluation = Evaluator(own, reporter)
        self._checkpoints = Checkpointer(
            own,
            self._trainer_state,
            self._step_logger,
            reporter,
            training.rates,
            self.run_directory,
        )
        self._closed = False
        self._is_open = True
        reporter.enter(BETWEEN_CALLS)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses what would be set and never read.

        Raises:
            IsotrainError: A session has no attribute of that name that can be set.
        """
        if self._is_open and name not in self.__dict__:
            raise IsotrainError(
                f"session.{name} cannot be set, and would change nothing. scale_learning_rate(factor)"
                " changes the rate, write_state(state) weights and slots; all else is in the spec."
            )
        super().__setattr__(name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    @property
    def replicas(self) -> int:
        """Replicas in the whole run."""
        return self.group.replicas

    @property
    def versions(self) -> dict[str, str]:
        """Of Python and of the packages that this process uses for the run."""
        return self._session_context.versions()

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks for all: rank 0."""
        return self.rank == 0

    @property
    def strategy(self) -> Strategy:
        """By which this process takes its steps."""
        return self._session_context.strategy

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self._trainer_state.total_steps

    @property
    def steps_done(self) -> int:
        """Steps taken so far."""
        return self._trainer_state.steps_done

    @property
    def is_done(self) -> bool:
        """Whether every step of the run has been taken, or `stop` was called."""
        return self._trainer_state.is_done

    @property
    def best_step(self) -> int | None:
        """Steps done when the best checkpoint was saved; None while none was called so."""
        steps = self._trainer_state.best_steps
        return steps[-1] if steps else None

    @property
    def last_loss(self) -> float | None:
        """Mean loss of the last step, for which this waits; None before the first. Local."""
        return self._trainer_state.loss

    def learning_rate(self, step: int) -> float:
        """The rate of a step, counted from 0 over the whole run, as it is scaled now. Local.

        Raises:
            IsotrainError: The optimizer sets its rates itself, and step is neither the last nor the next one.
        """
        return self._training.known_rate(step)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiplies the rates of all steps from here on, on top of the spec's schedule. Local.

        Args:
            factor: Above 0; every process passes the same. Factors multiply: 0.5 twice is a quarter.

        Raises:
            IsotrainError: It is no such number.
        """
        if not 0 < factor < math.inf:
            raise IsotrainError(
                f"scale_learning_rate: expected a number above 0, received {factor!r}."
            )
        self._trainer_state.rate_factor *= factor

    def batches(self) -> Iterator[Batch]:
        """Yields this process's part of every global batch from the next step to the run's end.

        After a `restore` in the middle it goes on from there.
        """
        return self._training.batches(self.group)

    def setup_notes(self) -> list[str]:
        """What became of initial weights and data, and how the group uses the model in its own way. Local."""
        return setup_notes(
            self.spec, self.group, self.initial_weights, self._session_context.loaders
        )

    def state_notes(self) -> list[str]:
        """What checkpoints, where they are asked for, cannot hold of the group's state. Local."""
        return state_notes(self.spec, self.group)

    def step_notes(self) -> list[str]:
        """What the group will honour in its own way, seen on the next batch."""
        batch = self.next_batch()
        return [] if batch is None else self.group.step_notes(batch)

    def next_batch(self) -> Batch | None:
        """What `batches` gives next, to look at: it gives that again; None after the last."""
        return self._training.next_batch(self.group)

    def stop(self) -> None:
        """Ends the training before its last step: `batches` gives no more. Every process calls it."""
        self._trainer_state.is_stopped = True
        self._training.finish(self.group)

    def save(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Saves a checkpoint; returns when it is written.

        Args:
            folder: Of checkpoints, at a path or URL; left out: this run's own.

        Raises:
            IsotrainError: Predictions are being read.
            RunFailedError: It cannot be written.
        """
        self._trainer_state.require_no_predictions("save")
        self._checkpoints.save(folder, self.notes)

    def save_if_due(self, *, best: bool = False, overlap_next_step: bool = False) -> bool:
        """Saves a checkpoint if the spec's `checkpoint` or a signal asks for one, while training goes on.

        For loops of your own: call it after each step and, at the end of an epoch, once all of the epoch
        is done.

        Args:
            best: Whether the weights are the best so far: then one is saved in any case, and kept.
            overlap_next_step: Whether nothing but the session changes weights until the next step's update:
                then their copy may be made while that step computes its gradients.

        Returns:
            Whether one is being saved.

        Raises:
            EndedError: The run was asked to end; its checkpoint is saved.
            IsotrainError: Predictions are being read.
        """
        self._trainer_state.require_no_predictions("save_if_due")
        return self._checkpoints.save_if_due(best, overlap_next_step, self.notes)

    def restore(self, checkpoint: str | os.PathLike[str] | None = None) -> None:
        """Goes on from a checkpoint: all state, and the step that comes next.

        Args:
            checkpoint: Its folder or URL, a folder of them or a run directory, of which the newest is
                taken; this run's newest when left out.

        Raises:
            IsotrainError: There is none, or it is of another run: says what differs. Or it is damaged: some
                state may be that of the checkpoint by then, and another one is to be restored.
        """
        self.notes = self._checkpoints.restore(checkpoint)

    def restore_best(self) -> None:
        """Takes the weights of the best checkpoint, and no other state.

        Raises:
            IsotrainError: No checkpoint was saved as the best.
        """
        self._checkpoints.restore_best()

    def seek(self, step: int) -> None:
        """Makes `batches` go on from a step (0 for the start); the state stays as it is. Local.

        Args:
            step: Counted from 0 over the whole run; every process passes the same.
        """
        self._trainer_state.seek(step)

    def step(self, batch: Batch) -> Tensor:
        """Trains on one global batch by the spec's strategy.

        Returns:
            The mean loss of the global batch: a scalar of the framework, the same on every process;
            `float(loss)` gives the number.
        """
        return self._training.step(self.group, batch)

    @property
    def strategy_report(self) -> dict[str, Any]:
        """What the strategy measured so far."""
        return dict(self.strategy.report())

    def disable_progress_reports(self) -> None:
        """Tells of all steps so far, and of none from here on: reading losses waits for the device. Local."""
        self._step_logger.end()

    def metrics(self) -> dict[str, float]:
        """Gives the training metrics over all samples since the last call, and starts them anew."""
        with self._reporter.doing("collect metrics"):
            return self.group.collect_metrics("train")

    def try_metrics(self, batch: Batch) -> None:
        """Finds out whether the spec's metrics give numbers, before anything is trained for them.

        Named ones do where targets and predictions fit them: they are tried only where evaluation is made
        ready anyway. For loops of your own: call it with the first batch, before its step.

        Args:
            batch: Is evaluated, of which nothing remains.

        Raises:
            SpecError: One does not.
        """
        if self.tries_metrics:
            self._evaluation.try_metrics(batch)

    @property
    def tries_metrics(self) -> bool:
        """Whether there is something that `try_metrics` would find out."""
        metrics = self.spec.metrics
        own = any(each.is_reference for each in metrics)
        return own or (bool(metrics) and self.can_evaluate)

    def refusals(self) -> dict[str, str]:
        """Finds out on the first batch what a run of several replicas is refused for.

        Runs of several replicas, or micro-batches, do so by themselves before their first step.

        Returns:
            What was found, by codes of the check.
        """
        return self._training.refusals(self.group)

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Computes loss and metrics over a whole data set.

        Args:
            data: What to evaluate on; the spec's validation data when left out.

        Returns:
            `loss` and each metric: exact means over all samples, whatever the number of replicas.

        Raises:
            DataError: There is no validation data.
        """
        return self._evaluation.evaluate(data)

    def predict(self, data: Any = None) -> Any:
        """Gives what the model predicts for every sample of a data set, in their order.

        Args:
            data: What to predict for; the spec's validation data when left out. Targets are ignored.

        Returns:
            An array of shape `[samples, ...]`, or a tree of such as the model gives, the same on every
            process and, to rounding, whatever the number of replicas.

        Raises:
            DataError: There is no validation data, or a process cannot know which samples the others see.
            UnsupportedError: What the model gives has no row for each sample.
        """
        return concatenated(list(self.predictions(data)))

    def predictions(self, data: Any = None) -> Iterator[Any]:
        """As `predict`, one global batch after the other, so that not all must be in memory at once.

        Every process reads it to its end, or closes it, before it takes a step or saves.
        """
        self._trainer_state.is_predicting = True
        try:
            yield from self._evaluation.predictions(data)
        finally:
            self._trainer_state.is_predicting = False

    @property
    def can_evaluate(self) -> bool:
        """Whether the spec's data has a validation part."""
        return self._session_context.loaders.data.validation is not None

    def end_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Adds an epoch's metrics to the run's history, and tells of all its steps."""
        self._step_logger.flush()
        if self.is_main:
            done, reports = self.steps_done, self._step_logger
            loss = self.last_loss if reports.is_silent else reports.epoch_loss()
            self._reporter.emit(
                EpochEnded(metrics=dict(metrics), epoch=epoch, done=done, loss=loss)
            )

    def read_state(self, kinds: Sequence[StateKind] = MODEL_STATE) -> dict[str, np.ndarray]:
        """Copies named state to NumPy: weights under their path, slots under `optimizer/`. Local."""
        return self.group.read_state(kinds)

    def write_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets named state on every replica; every process passes the same."""
        self.group.write_state(state)
        self.strategy.state_written(self.group)

    def barrier(self) -> None:
        """Returns once every process has called it."""
        with self._reporter.doing("barrier"):
            self.group.barrier()

    def close(self) -> None:
        """Leaves the run; the session cannot be used afterwards. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._reporter.enter(CLOSE)
        self._checkpoints.wait()
        self._training.finish(self.group)
        self._step_logger.flush()
        self._trainer_state.last_loss = None
        self.group.close()
