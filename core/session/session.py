"""The session: one process's handle on a run, the same API under every backend."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from isotrain.core.contracts.backend.replica import Tensor
from isotrain.core.contracts.events import EpochEnded
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import ProcessContext, ServerConnection
from isotrain.core.contracts.reporter import BETWEEN_CALLS, CLOSE, Reporter
from isotrain.core.contracts.state import MODEL_STATE, StateKind
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.data.batch import Batch
from isotrain.core.data.dataset import DataSet
from isotrain.core.errors import IsotrainError
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.checkpointer import Checkpointer
from isotrain.core.session.training.context import build_session_context, setup_notes, state_notes
from isotrain.core.session.training.evaluation import Evaluator
from isotrain.core.session.training.freezing import WeightFreezer
from isotrain.core.session.training.media_log import MediaLog
from isotrain.core.session.training.plateau import plateau_fraction
from isotrain.core.session.training.predictions import concatenated
from isotrain.core.session.training.session_log import SessionLog
from isotrain.core.session.training.timers import Stopwatch
from isotrain.core.session.training.train_step import TrainLoop
from isotrain.core.spec.schedules import PlateauSchedule


class Session:
    """One process's handle on a run, for a custom training loop: step, evaluate, predict, save, restore.

    Methods are collective unless marked "Local.": every process calls them at the same point. Properties
    are local. Attributes that do not exist cannot be set.

    Attributes:
        spec: The training spec.
        plan: The plan of the run, completed with the numbers of samples and parameters.
        group: The replica group of this process.
        rank: Rank of this process.
        run_directory: Directory of the run's files.
        callbacks: Callbacks of the spec, which `isotrain.run` calls; names replaced by what is registered.
        updates: What a step does by name: one, with an empty name, unless the spec has `updates`.
        initial_weights: Report on the initial weights that the spec names; None where it names none.
        notes: JSON values of a custom loop. Every checkpoint holds those of rank 0; `restore` brings them
            back on every process.
        iteration: JSON values of the built-in loop about what is done after the last step; an elastic run
            takes them to its next process group.
    """

    _is_open = False

    def __init__(
        self,
        resolved_spec: ResolvedSpec,
        plan: Plan,
        context: ProcessContext,
        reporter: Reporter,
        server_connection: ServerConnection | None = None,
        *,
        resumes: bool = False,
        may_stop: bool = False,
        survives: Callable[[BaseException], bool] = lambda error: False,
        data: DataSet | None = None,
    ) -> None:
        """Builds the model, connects to the other processes and loads the data. Collective.

        Args:
            resolved_spec: The spec with its plugin references resolved.
            plan: The plan of the run.
            context: Rank, device mesh and run directory of this process.
            reporter: Sends events to the launcher.
            server_connection: Connection to the parameter server; needed in parameter-server runs only.
            resumes: Whether `restore` is called next: initial weights are not read then.
            may_stop: Whether the launcher may request that training ends early.
            survives: Whether the run goes on in another process group after an error.
            data: Data set that this process has loaded already; None: it is loaded.
        """
        self.stopwatch = Stopwatch()
        self._session_context = session_context = build_session_context(
            resolved_spec,
            plan,
            context,
            reporter,
            server_connection,
            resumes=resumes,
            data=data,
        )
        self.spec = resolved_spec.spec
        self.callbacks = resolved_spec.callbacks
        self.plan = session_context.plan
        self.group = session_context.group
        self.rank = context.rank
        self.run_directory = Path(context.run_directory)
        self.initial_weights = session_context.initial_weights
        self.notes: dict[str, Any] = {}
        self.iteration: dict[str, Any] = {}
        self.survives = survives
        self._reporter = reporter
        self._training = training = TrainLoop(
            session_context, reporter, self.stopwatch, self.run_directory, may_stop=may_stop
        )
        self.updates = training.updates
        self._trainer_state, self._step_logger = training.trainer_state, training.step_logger
        self._freezer = WeightFreezer(session_context, self._trainer_state)
        self._log = SessionLog(self.group, self._trainer_state, self._step_logger)
        self._media_log = MediaLog(self._log, reporter, self.run_directory)
        self._evaluation = Evaluator(
            session_context, reporter, training.average, training.evaluation_values
        )
        self._checkpoints = Checkpointer(
            session_context,
            self._trainer_state,
            self._step_logger,
            reporter,
            next(iter(training.updates.values())),
            training.average,
            self._freezer,
            self.run_directory,
        )
        self._closed = False
        self._is_open = True
        reporter.enter(BETWEEN_CALLS)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to set an attribute that nothing would read.

        Raises:
            IsotrainError: The session has no attribute of that name.
        """
        if self._is_open and name not in self.__dict__:
            raise IsotrainError(
                f"session.{name} cannot be set, and would change nothing. set_learning_rate(rate) sets the"
                " learning rate, write_state(state) weights and optimizer state; all else is in the spec."
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
        """Number of replicas in the run."""
        return self.group.replicas

    @property
    def versions(self) -> dict[str, str]:
        """Versions of Python and of the packages that take part in the run, by name."""
        return self._session_context.versions()

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    @property
    def strategy(self) -> Strategy:
        """The strategy that takes the training steps of this process."""
        return self._session_context.strategy

    @property
    def total_steps(self) -> int:
        """Number of steps of the run, over all epochs."""
        return self._trainer_state.total_steps

    @property
    def steps_done(self) -> int:
        """Number of steps taken so far."""
        return self._trainer_state.steps_done

    @property
    def skipped_steps(self) -> int:
        """Number of steps so far, or of updates of steps, that `on_nan: skip` has left out."""
        return self._trainer_state.skipped_steps

    @property
    def is_done(self) -> bool:
        """Whether every step of the run has been taken, or `stop` was called."""
        return self._trainer_state.is_done

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint so far; None while none was saved as the best."""
        steps = self._trainer_state.best_steps
        return steps[-1] if steps else None

    @property
    def last_loss(self) -> float | None:
        """Mean loss of the last step; None before the first. Waits for the device. Local."""
        return self._trainer_state.loss

    @property
    def gradient_norm(self) -> float | None:
        """Norm of all gradients of the last step, before clipping; where the spec has it recorded. Local.

        None before the first step, or without that field. Waits for the device.
        """
        norm = self._trainer_state.last_gradient_norm
        return None if norm is None else float(norm)

    def learning_rate(
        self, step: int, update: str | None = None, group: int | None = None
    ) -> float:
        """Learning rate of a step (from 0 over the whole run), with what the session changed. Local.

        Args:
            step: Index of the step.
            update: Name of the update, where the spec has `updates`.
            group: Index in `optimizer.groups`, for the rate of a group with its `lr_factor`, before
                `layer_decay`; None for the rate of the step.

        Raises:
            IsotrainError: The optimizer sets its rates itself, and step is neither the last nor the next one;
                or the spec has no such update or group.
        """
        return self._training.learning_rate(step, update, group)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiplies the learning rates of all later steps, on top of the schedule or of a set rate. Local.

        Args:
            factor: A finite number, 0 or larger, the same on every process. Factors multiply: 0.5 twice is
                0.25.

        Raises:
            IsotrainError: The factor is not such a number.
        """
        self._trainer_state.rate_factor *= _not_negative("scale_learning_rate", factor)

    def set_learning_rate(self, rate: float | None) -> None:
        """Sets the learning rate of all later steps, in place of the spec's schedule and of factors. Local.

        Args:
            rate: A finite number, 0 or larger, the same on every process; later factors of
                `scale_learning_rate` multiply it. None returns to the spec's rates.

        Raises:
            IsotrainError: The rate is not such a number, or the spec has `updates`, with a rate each.
        """
        if rate is not None and self.spec.updates:
            raise IsotrainError(
                "set_learning_rate: each of the spec's updates has its own rate; scale_learning_rate(factor)"
                " multiplies them all."
            )
        self._trainer_state.fixed_rate = (
            None if rate is None else _not_negative("set_learning_rate", rate)
        )
        self._trainer_state.rate_factor = 1.0

    def freeze(self, patterns: str | Sequence[str]) -> None:
        """Freezes weights from the next step on: they are neither updated nor exchanged.

        Their optimizer state stays as it is. A layer all of whose weights are frozen computes as in
        evaluation. Checkpoints hold what is frozen.

        Args:
            patterns: Pattern of weight names, such as `backbone/*`, or several; the same on every process.

        Raises:
            IsotrainError: A pattern matches no weight, or no trainable weight is left.
            UnsupportedError: The spec has `updates`, or strategy, backend or optimizer cannot do it.
        """
        self._trainer_state.require_training_weights("freeze")
        self._freezer.freeze(patterns)

    def unfreeze(self, patterns: str | Sequence[str]) -> None:
        """Trains weights again that `freeze` has frozen; their optimizer state goes on where it was.

        Args:
            patterns: Pattern of weight names, such as `backbone/*`, or several; the same on every process.

        Raises:
            IsotrainError: A pattern matches no weight, or one that `initial_weights.freeze` has frozen.
        """
        self._trainer_state.require_training_weights("unfreeze")
        self._freezer.unfreeze(patterns)

    def batches(self) -> Iterator[Batch]:
        """Yields this process's part of each global batch, from the next step to the end of the run.

        After a `restore` in the middle it continues from the restored step.
        """
        return self._training.batches()

    def local_rows(self, rows: Any) -> Any:
        """Rows of this process, where each has the same rows: a contiguous part for each rank. Local.

        Args:
            rows: Array, tensor, list or range; the same on every process.

        Returns:
            The part, of the same kind; parts of two processes differ by at most one row. On the
            coordinator of a parameter-server run, these are all rows.
        """
        count = sum(each.has_session for each in self.plan.processes)
        begin, end = (len(rows) * rank // count for rank in (self.rank, self.rank + 1))
        return rows[begin:end]

    def batch(self, inputs: Any, targets: Any = None, sample_weights: Any = None) -> Batch:
        """Makes the global batch of the next step of arrays that each process has for itself.

        The mean loss is over the rows of all processes, which may have different numbers of them. A process
        with several replicas divides its rows among them.

        Args:
            inputs: Array or tensor of shape `[rows, ...]`, or tuple or dict of such; copied. Rows may be 0.
                Processes may have other widths, as of padded sequences, if each has a row.
            targets: As `inputs`; None where the loss needs none.
            sample_weights: Factors of the rows' losses, shape `[rows]`; None for 1.

        Raises:
            DataError: Arrays have different numbers of rows, no process has a row, processes differ in the
                parts or axes of their arrays, or the loss needs targets.
            IsotrainError: No step is left; or the step of the present batch of `batches` is taken already.
            UnsupportedError: In pipeline and tensor-parallel runs, where processes share a replica.
        """
        return self._training.custom_batch(inputs, targets, sample_weights)

    def call(self, inputs: Any) -> Any:
        """Calls the model, as it is now on this process, in evaluation mode. Local.

        Args:
            inputs: Array or tensor of shape `[rows, ...]`, or tuple or dict of such.

        Returns:
            The model's outputs: an array, or arrays in dicts, lists and tuples.

        Raises:
            UnsupportedError: This process does not have all weights: in pipeline, tensor-parallel and fully
                sharded runs.
        """
        return self._evaluation.call(inputs)

    @property
    def model(self) -> Any:
        """The model of this process's replicas: torch module, Keras model, or what the spec's callable built.

        Raises:
            UnsupportedError: The backend does not give it.
        """
        return self.group.model

    def setup_notes(self) -> list[str]:
        """Plan notes on initial weights, data, learning rates and the model's execution. Local."""
        return setup_notes(
            self.spec, self.group, self.initial_weights, self._session_context.loaders
        )

    def state_notes(self) -> list[str]:
        """Plan notes on state that the run's checkpoints cannot hold; none without checkpoints. Local."""
        return state_notes(self.spec, self.group)

    def step_notes(self) -> list[str]:
        """Plan notes on how the group executes a step, found on the next batch."""
        batch = self.next_batch()
        return [] if batch is None else self.group.step_notes(batch)

    def next_batch(self) -> Batch | None:
        """The batch that `batches` yields next, without consuming it; None after the last."""
        return self._training.next_batch()

    def stop(self) -> None:
        """Ends training early: `batches` yields no more."""
        self._trainer_state.is_stopped = True
        self._training.finish()

    def save(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Saves a checkpoint; returns when it is written.

        Args:
            folder: Path or URL of a folder of checkpoints; this run's when left out.

        Raises:
            IsotrainError: Predictions are being read.
            RunFailedError: The checkpoint cannot be written.
        """
        self._trainer_state.require_training_weights("save")
        self._checkpoints.save(folder, self.notes)

    def save_if_due(self, *, best: bool = False, overlap_next_step: bool = False) -> bool:
        """Begins to save a checkpoint if the spec's `checkpoint` or a signal requests one.

        For custom loops: call it after each step; at the end of an epoch, after validation. Writing goes on
        in the background.

        Args:
            best: Whether the weights are the best so far: a checkpoint is then saved in any case, and kept.
            overlap_next_step: Whether nothing but the session changes weights until the next step's update:
                they may then be copied while that step computes its gradients.

        Returns:
            Whether a checkpoint is being saved.

        Raises:
            EndedError: A signal requested the end of the run; its checkpoint is saved.
            IsotrainError: Predictions are being read.
        """
        self._trainer_state.require_training_weights("save_if_due")
        return self._checkpoints.save_if_due(best, overlap_next_step, self.notes)

    def restore(self, checkpoint: str | os.PathLike[str] | None = None) -> None:
        """Loads a checkpoint: all state, and the step to continue from.

        Args:
            checkpoint: Path or URL of a checkpoint; or of a folder of checkpoints or a run directory, of
                which the newest is loaded. This run's newest when left out.

        Raises:
            IsotrainError: There is no checkpoint, or it belongs to a different run (the message lists the
                differences), or it is damaged. State may be partly loaded after damage: restore another one.
        """
        self._trainer_state.require_training_weights("restore")
        self.notes = self._checkpoints.restore(checkpoint)

    def restore_best(self) -> None:
        """Loads the weights of the best checkpoint, and no other state.

        Raises:
            IsotrainError: No checkpoint was saved as the best.
        """
        self._trainer_state.require_training_weights("restore_best")
        self._checkpoints.restore_best()

    def seek(self, step: int) -> None:
        """Makes `batches` continue from a step; the state stays as it is. Local.

        Args:
            step: Index of the step, from 0 over the whole run; the same on every process.
        """
        self._trainer_state.seek(step)

    def step(
        self,
        batch: Batch,
        update: str | None = None,
        *,
        values: Mapping[str, float] | None = None,
    ) -> Tensor:
        """Takes one training step with the spec's strategy.

        Args:
            batch: Batch to train on.
            update: Name of the one of the spec's `updates` to do; None: all that are due, in their order.
                Several updates with one batch are one step: its record has the sum of their losses.
            values: Scalars that the objective gets as `step.values`, besides those of the spec, by name; the
                same on every process.

        Returns:
            The mean loss of the global batch: a scalar tensor of the framework, the same on every process.
            `float(loss)` waits for the number.
        """
        return self._training.step(_with_values(batch, values), update)

    def gradients(
        self,
        batch: Batch,
        update: str | None = None,
        *,
        values: Mapping[str, float] | None = None,
    ) -> tuple[list[list[Tensor]], Tensor]:
        """Computes the gradients of the mean loss over the global batch, and changes no trainable weight.

        For steps of your own, which `apply_gradients` ends; under strategy `data-parallel` only.

        Args:
            batch: Batch to compute with.
            update: Name of the update, where the spec has `updates`.
            values: Scalars that the objective gets as `step.values`, as in `step`.

        Returns:
            For each local replica one gradient of each trainable weight's shape, in the order of the weights'
            names, equal on all replicas; and the mean loss, a scalar. Tensors of the framework.

        Raises:
            UnsupportedError: The strategy has a step of its own.
        """
        return self._training.gradients(_with_values(batch, values), update)

    def apply_gradients(
        self,
        batch: Batch,
        gradients: Sequence[Sequence[Tensor]],
        loss: Tensor,
        update: str | None = None,
    ) -> None:
        """Takes the training step of a batch with these gradients.

        Args:
            batch: Batch of the step.
            gradients: For each local replica one gradient of each trainable weight's shape, equal on all
                replicas; they are clipped and applied at the rate of the step.
            loss: Mean loss to record for the step, a scalar.
            update: Name of the update, where the spec has `updates`.

        Raises:
            UnsupportedError: The strategy has a step of its own.
        """
        self._training.apply_gradients(batch, gradients, loss, update)

    @property
    def strategy_report(self) -> dict[str, Any]:
        """Measurements of the strategy so far, as JSON values."""
        return dict(self.strategy.report())

    def data_read(self) -> dict[str, dict[str, int]]:
        """Samples and bytes that each host has read of the training stream; empty for data by position.

        Collective.
        """
        return self._session_context.loaders.data_read()

    def disable_progress_reports(self) -> None:
        """Reports all steps so far, and none from here on: reading a loss waits for the device. Local."""
        self._step_logger.stop()

    def metrics(self) -> dict[str, float]:
        """Returns the training metrics over all samples since the last call, and resets them."""
        with self._reporter.doing("collect metrics"):
            return self.group.collect_metrics("train")

    def try_metrics(self, batch: Batch) -> dict[str, float]:
        """Checks on one batch that the spec's metrics return numbers, before any training.

        Built-in metrics are checked only if the data has a validation part. For custom loops: call it with
        the first batch, before its step.

        Args:
            batch: Batch to evaluate; the state of weights and metrics is as before afterwards.

        Returns:
            Loss and metrics of the batch by name; nothing if `tries_metrics` is false.

        Raises:
            SpecError: A metric does not return a number.
        """
        return self._evaluation.try_metrics(batch) if self.tries_metrics else {}

    @property
    def tries_metrics(self) -> bool:
        """Whether `try_metrics` evaluates anything."""
        specs, monitors = self.spec.update_specs.values(), bool(self.spec.monitored_metrics)
        return any(
            (each.metrics and self.can_evaluate)
            or any(metric.is_reference for metric in each.metrics)
            or (each.objective is not None and monitors)
            for each in specs
        )

    def refusals(self) -> dict[str, str]:
        """Checks on the first batch whether a run of several replicas would be refused.

        Runs with several replicas or micro-batches check this themselves before their first step.

        Returns:
            The reason of each refusal, by check code.
        """
        return self._training.refusals()

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Computes loss and metrics over a whole data set.

        Args:
            data: Data set to evaluate on; the spec's validation data when left out.

        Returns:
            `loss` and each metric by name: exact means over all samples, whatever the number of replicas.

        Raises:
            DataError: There is no validation data.
        """
        return self._evaluation.evaluate(data)

    def validate(self) -> dict[str, float]:
        """Evaluates on the validation data and on each of the data's `validation_sets`.

        Returns:
            What `evaluate` returns, with names as in the history: `validation_loss` and so on for the
            validation data, `validation_NAME_loss` for a named set; empty without any.
        """
        return self._evaluation.validate()

    def predict(self, data: Any = None) -> Any:
        """Returns the model's predictions for every sample of a data set, in order.

        Args:
            data: Data set to predict for; the spec's validation data when left out. Targets are ignored.

        Returns:
            An array of shape `[samples, ...]` or the model's structure of such arrays; the same on every
            process and, up to rounding, whatever the number of replicas.

        Raises:
            DataError: There is no validation data, or the data is a stream that shards itself.
            UnsupportedError: A model output does not have one row per sample.
        """
        return concatenated(list(self.predictions(data)))

    def predictions(self, data: Any = None) -> Iterator[Any]:
        """Yields what `predict` returns one global batch at a time, for data larger than memory.

        Every process exhausts or closes the iterator before it takes a step or saves.
        """
        self._trainer_state.is_predicting = True
        try:
            yield from self._evaluation.predictions(data)
        finally:
            self._trainer_state.is_predicting = False

    @property
    def can_evaluate(self) -> bool:
        """Whether the spec's data has a validation part, or named sets."""
        return bool(self.validation_prefixes)

    @property
    def validation_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the names of `validate`: `validation_`, and `validation_NAME_` of a named set."""
        return tuple(self._session_context.loaders.data.all_validation)

    def end_epoch(self, epoch: int, metrics: Mapping[str, float]) -> float | None:
        """Adds an epoch's metrics to the run's history, and reports all its steps.

        It calls `reduce_on_plateau` with these metrics.

        Returns:
            On rank 0, and on all ranks of an elastic run, the mean loss over the samples of the epoch, each
            as it was when it was trained on; None on the others, and where no step of the epoch counts.
        """
        self.reduce_on_plateau(metrics)
        self._step_logger.flush()
        if not self.is_main and self.spec.elastic is None:
            return None
        done, reports = self.steps_done, self._step_logger
        loss = self.last_loss if reports.is_silent else reports.epoch_loss()
        self._reporter.report(EpochEnded(metrics=dict(metrics), epoch=epoch, done=done, loss=loss))
        return loss

    def reduce_on_plateau(self, metrics: Mapping[str, float]) -> None:
        """Lowers the learning rate of schedule `plateau` if its metric has stopped improving. Local.

        For loops that evaluate within epochs: `end_epoch` does so by the metrics of an epoch.

        Args:
            metrics: Metrics by name, with names as in the history; the same on every process. Without that
                of the schedule nothing happens.
        """
        fractions = self._trainer_state.plateau_fractions
        for name, spec in self.spec.update_specs.items():
            if isinstance(spec.schedule, PlateauSchedule):
                key, fraction = f"plateau {name}".rstrip(), fractions.get(name, 1.0)
                fractions[name] = plateau_fraction(
                    spec.schedule, metrics, self.notes, key, fraction
                )

    def log(self, scalars: Mapping[str, Any], step: int | None = None) -> None:
        """Records named scalars of a step in the history and the spec's loggers. Local.

        Those of rank 0 are recorded, other ranks may call it or not. It does not wait for the device.

        Args:
            scalars: Numbers, or tensors with one element, by name. They are copied; a tensor is read when
                steps are reported, at the latest after some seconds.
            step: Index of the step, from 0 over the run. The last one taken when left out, or the first one
                before any.

        Raises:
            IsotrainError: A value is no scalar, a name is one that the run records itself, or the step is
                still to come after the next one.
        """
        self._log.scalars(scalars, step)

    def log_image(self, name: str, image: Any, step: int | None = None) -> None:
        """Writes an image of a step into the run directory, for the spec's loggers too; as `log`. Local.

        Args:
            name: Name of letters, digits, `-` and `_`, in parts divided by `/`: a folder in `media`.
            image: Array or tensor of shape `[height, width]` or `[height, width, channels]` with 1, 3 (RGB)
                or 4 channels (with opacity): uint8, or floats from 0 to 1. Waits for its tensor.
            step: Index of the step, as in `log`.

        Raises:
            IsotrainError: It is no such image, or the name or the step cannot be.
        """
        self._media_log.image(name, image, step)

    def log_histogram(
        self, name: str, values: Any, step: int | None = None, *, bins: int = 64
    ) -> None:
        """Writes the histogram of values of a step into the run directory; as `log_image`. Local.

        Args:
            name: Name, as in `log_image`.
            values: Array or tensor of any shape, such as the gradients of a weight; NaN and infinity are
                counted apart.
            step: Index of the step, as in `log`.
            bins: Number of bins of one width, from the smallest value to the largest.

        Raises:
            IsotrainError: There is no finite value, or the name or the step cannot be.
        """
        self._media_log.histogram(name, values, bins, step)

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Writes a text of a step into the run directory; as `log_image`. Local.

        Args:
            name: Name, as in `log_image`.
            text: The text.
            step: Index of the step, as in `log`.

        Raises:
            IsotrainError: The name or the step cannot be.
        """
        self._media_log.text(name, text, step)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model has the average of its weights (`ema` or `swa`).

        Local; called by all processes where the strategy shards weights or cuts layers (`sharded`, `tensor`).

        `evaluate`, `predict` and `predictions` use the average in any case. Before it begins, the weights are
        those of training. Steps, saves and changes of state are refused within.

        Raises:
            IsotrainError: The spec has neither `ema` nor `swa`.
        """
        if self.spec.weight_average is None:
            raise IsotrainError(
                "session.averaged: the spec has neither `ema` nor `swa`, so there is no average."
            )
        with self._training.average.applied(self.group):
            yield

    def read_state(self, kinds: Sequence[StateKind] = MODEL_STATE) -> dict[str, np.ndarray]:
        """Copies state to NumPy by name, in its shapes; optimizer state begins with `optimizer/`. Local."""
        return self.group.read_state(kinds)

    def write_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets state by name, shapes as read, on every replica; every process passes the same arrays."""
        self._trainer_state.require_training_weights("write_state")
        self._training.average.settle(self.group)
        self.group.write_state(state)
        self.strategy.state_written(self.group)

    def barrier(self) -> None:
        """Waits until every process has called it."""
        with self._reporter.doing("barrier"):
            self.group.barrier()

    def close(self) -> None:
        """Leaves the run; the session cannot be used afterwards. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._reporter.enter(CLOSE)
        self._checkpoints.wait()
        self._training.finish()
        self._step_logger.finish()
        self._trainer_state.last_loss = self._trainer_state.last_gradient_norm = None
        self._session_context.loaders.close()
        self.group.close()


def _not_negative(call: str, number: float) -> float:
    """The number as a Python float.

    Raises:
        IsotrainError: It is negative, infinite or NaN.
    """
    if not 0 <= number < math.inf:
        raise IsotrainError(f"{call}: expected a finite number, 0 or larger, received {number!r}.")
    return float(number)


def _with_values(batch: Batch, values: Mapping[str, float] | None) -> Batch:
    """A batch with further values for the objective."""
    return replace(batch, values={**batch.values, **values}) if values else batch
