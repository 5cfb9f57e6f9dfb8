"""What a person with their own loop holds: one process's view of a run, the same under every backend."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from isotrain.core.checkpoints.finding import checkpoint_at
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.contracts.events import EpochEnded, Evaluating, Resumed
from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.contracts.replica import Tensor
from isotrain.core.contracts.reporter import BETWEEN_CALLS, Reporter
from isotrain.core.contracts.service import Service
from isotrain.core.contracts.state import MODEL_STATE, StateKind
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.data.batches import Batch
from isotrain.core.data.sources import ShardedStream, as_source
from isotrain.core.errors import DataError, EndedError, IsotrainError, RunFailedError
from isotrain.core.launching.run_directory import checkpoint_folder
from isotrain.core.planning.make_plan import Measured, with_measures
from isotrain.core.plugins.host import PluginHost
from isotrain.core.plugins.named_model import with_named_model
from isotrain.core.running import resuming
from isotrain.core.running.data_loading import load_data
from isotrain.core.running.initial_weights import start_from
from isotrain.core.running.learning_rates import LearningRates
from isotrain.core.running.loaders import Loaders
from isotrain.core.running.loss_watch import LossWatch, culprit
from isotrain.core.running.predictions import joined, predicted
from isotrain.core.running.saving import Position, Saver
from isotrain.core.running.step_reports import StepReports
from isotrain.core.running.stopwatch import Stopwatch
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.collector import collection_paused
from isotrain.core.system.versions import versions


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
        spec: TrainingSpec,
        plan: Plan,
        context: ProcessContext,
        host: PluginHost,
        reporter: Reporter,
        service: Service | None = None,
    ) -> None:
        """Loads the data, builds the model and joins the other processes.

        Args:
            spec: What is trained.
            plan: How.
            context: This process's place.
            host: Knows the backend, strategy and model.
            reporter: Tells the launcher.
            service: This process's part in a served run; needed there only.
        """
        self.spec = spec
        self.rank = context.rank
        self.run_directory = Path(context.run_directory)
        self._reporter = reporter
        self.stopwatch = Stopwatch()
        reporter.enter("build model")
        adapter = host.backend(plan.backend)
        self._packages = adapter.packages
        with collection_paused():  # it imports the framework
            named = with_named_model(spec, host)
            self.group: ReplicaGroup = (
                adapter.start(named, plan.setting, context)
                if service is None or context.role == "replica"
                else adapter.start_served(named, plan.setting, service)
            )
        reporter.enter("load data")  # by now the framework is set up, which data may be made with
        self._loaders = Loaders(spec, plan, self.group, load_data(spec))
        self._strategy = host.strategy(plan.strategy, plan.strategy_options)
        self.initial_weights = start_from(spec, plan, self.group)
        self.plan = with_measures(
            plan, spec, self._measured(), strategy=self._strategy, adapter=adapter
        )
        self._strategy.started(self.group)
        self._strategy_finished = False
        self._last_loss: Tensor | None = None
        self._training = self._loaders.training()
        self._rates = LearningRates(
            spec,
            global_batch=plan.global_batch,
            steps_per_epoch=self._training.steps_per_epoch,
            total_steps=self._training.total_steps,
        )
        self._rate_factor = 1.0
        self._steps_done = 0
        self._is_stopped = False
        self._restores = 0
        self._best_steps: list[int] = []
        self.notes: dict[str, Any] = {}
        self._step_reports = self._heard_step_reports()
        self._saver = Saver(
            self._checkpoint_folder(),
            spec,
            self.plan,
            self.group,
            self._strategy,
            reporter,
            lambda: self.versions,
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
        return versions(self._packages)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks for all: rank 0."""
        return self.rank == 0

    @property
    def strategy(self) -> Strategy:
        """By which this process takes its steps."""
        return self._strategy

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self._training.total_steps

    @property
    def steps_done(self) -> int:
        """Steps taken so far."""
        return self._steps_done

    @property
    def is_done(self) -> bool:
        """Whether every step of the run has been taken, or `stop` was called."""
        return self._is_stopped or self._steps_done >= self.total_steps

    @property
    def best_step(self) -> int | None:
        """Steps done when the best checkpoint was saved; None while none was called so."""
        return self._best_steps[-1] if self._best_steps else None

    @property
    def last_loss(self) -> float | None:
        """Mean loss of the last step, for which this waits; None before the first. Local."""
        return None if self._last_loss is None else float(self._last_loss)

    def learning_rate(self, step: int) -> float:
        """The rate of a step, counted from 0 over the whole run, as it is scaled now. Local."""
        return self._rates(step) * self._rate_factor

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
        self._rate_factor *= factor

    def batches(self) -> Iterator[Batch]:
        """Yields this process's part of every global batch from the next step to the run's end.

        After a `restore` in the middle it goes on from there.
        """
        restores: int | None = None
        while restores != self._restores:
            restores = self._restores
            yield from self._batches_until_restored()

    def _batches_until_restored(self) -> Iterator[Batch]:
        restores = self._restores
        self._reporter.enter("next batch")
        for batch in self._training.from_step(self._steps_done):
            if self._is_stopped or restores != self._restores:
                break
            self._require_same_samples(batch)
            self._reporter.enter(BETWEEN_CALLS)
            yield batch
            self._reporter.enter("next batch")
        self._reporter.enter(BETWEEN_CALLS)

    def remarks(self) -> list[str]:
        """What became of initial weights, and how the group uses the model in its own way. Local."""
        of_weights = [] if self.initial_weights is None else self.initial_weights.remarks()
        return [*of_weights, *self.group.remarks(), *self.state_remarks()]

    def state_remarks(self) -> list[str]:
        """What checkpoints, where they are asked for, cannot hold of the group's state. Local."""
        lost = [] if self.spec.checkpoint is None else self.group.not_carried()
        return [f"checkpoint: a run that goes on has not {each}" for each in lost]

    def step_remarks(self) -> list[str]:
        """What the group will honour in its own way, seen on the next batch."""
        batch = next(self.batches(), None)
        return [] if batch is None else self.group.step_remarks(batch)

    def stop(self) -> None:
        """Ends the training before its last step: `batches` gives no more. Every process calls it."""
        self._is_stopped = True
        self._finish_strategy()

    def save(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Saves a checkpoint; returns when it is written.

        Args:
            folder: Of checkpoints, at a path or URL; left out: this run's own.

        Raises:
            RunFailedError: It cannot be written.
        """
        with self._in_call("save checkpoint"):
            elsewhere = None if folder is None else CheckpointFolder(folder)
            self._saver.save(self._position(), elsewhere)
            fault = self._saver.wait()
        if fault is not None:
            raise RunFailedError(
                f"the checkpoint of step {self._steps_done} was not saved: {fault}"
            )

    def save_if_due(self, *, best: bool = False) -> bool:
        """Saves a checkpoint if the spec's `checkpoint` or a signal asks for one, while training goes on.

        For loops of your own: call it after each step and, at the end of an epoch, once all of the epoch
        is done.

        Args:
            best: Whether the weights are the best so far: then one is saved in any case, and kept.

        Returns:
            Whether one is being saved.

        Raises:
            EndedError: The run was asked to end; its checkpoint is saved.
        """
        if self.spec.checkpoint is None:
            return False
        wishes = self._saver.wishes(self._steps_done)
        if best:
            self._best_steps.append(self._steps_done)
        per_epoch = self._training.steps_per_epoch
        due = self.is_done or self._saver.is_due(self._steps_done, per_epoch)
        if not (due or best or wishes.save):
            return False
        with self._in_call("save checkpoint"):
            self._saver.save_once(self._position())
        if wishes.end and not self.is_done:
            self._end_as_asked()
        return True

    def _position(self) -> Position:
        """Where the run is; waits for the losses of its steps."""
        self._flush_step_reports()
        epoch_loss = (0.0, 0) if self._step_reports is None else self._step_reports.epoch_so_far
        return Position(
            self._steps_done,
            self._rate_factor,
            *epoch_loss,
            list(self._best_steps),
            self.last_loss,
            self._strategy_finished,
            dict(self.notes),
        )

    def _checkpoint_folder(self) -> CheckpointFolder | None:
        """Where this run's own checkpoints lie; a session that nobody launched has no directory for them."""
        policy = self.spec.checkpoint
        if not self._reporter.is_heard and (policy is None or policy.folder is None):
            return None
        return CheckpointFolder(checkpoint_folder(self.spec, self.run_directory))

    def _end_as_asked(self) -> None:
        """Ends this process's part of the run when its checkpoint is written."""
        self._saver.wait()
        self.barrier()
        raise EndedError(f"the run was asked to end, and did after step {self._steps_done}")

    def restore(self, checkpoint: str | os.PathLike[str] | None = None) -> None:
        """Goes on from a checkpoint: all state, and the step that comes next.

        Args:
            checkpoint: Its folder or URL, a folder of them or a run directory, of which the newest is
                taken; this run's newest when left out.

        Raises:
            IsotrainError: There is none, it is damaged, or it is of another run: says what differs.
        """
        with self._in_call("restore"):
            saved = resuming.Saved(checkpoint_at(checkpoint or self._saver.own_folder.location))
            changes = resuming.changes(saved, self.spec, self.plan)
            lost = resuming.load(saved, self.group, self._strategy, self.plan)
            position = saved.position
            self.seek(position.step)
            self._strategy_finished = position.is_finished
            self._restores += 1
            self._last_loss = position.last_loss
            self._rate_factor = position.rate_factor
            self.notes = dict(position.notes)
            if self._step_reports is not None:
                step, total, samples = position.step, position.epoch_loss, position.epoch_samples
                self._step_reports.go_on_from(step, total, samples)
            is_own = self._saver.went_back_to(saved.checkpoint)
            self._best_steps = list(position.best_steps) if is_own else []
            if self.is_main:
                self._reporter.emit(
                    Resumed(
                        done=position.step,
                        location=saved.checkpoint.location,
                        changes=changes,
                        lost=lost,
                    )
                )

    def restore_best(self) -> None:
        """Takes the weights of the best checkpoint, and no other state.

        Raises:
            IsotrainError: No checkpoint was saved as the best.
        """
        if not self._best_steps:
            raise IsotrainError("restore_best: no checkpoint was saved as the best so far.")
        with self._in_call("restore"):
            self._saver.wait()
            self.barrier()
            saved = resuming.Saved(self._saver.last_of(self._best_steps))
            resuming.load_weights(saved, self.group)
            self._strategy.state_written(self.group)

    def seek(self, step: int) -> None:
        """Makes `batches` go on from a step (0 for the start); the state stays as it is. Local.

        Args:
            step: Counted from 0 over the whole run; every process passes the same.
        """
        self._steps_done = step
        self._strategy_finished = False

    def step(self, batch: Batch) -> Tensor:
        """Trains on one global batch by the spec's strategy.

        Returns:
            The mean loss of the global batch: a scalar of the framework, the same on every process;
            `float(loss)` gives the number.
        """
        reporter = self._reporter
        reporter.step = batch.step
        reporter.enter("step")
        rate = self._rates(batch.step) * self._rate_factor
        self._strategy_finished = False
        loss = self._strategy.step(self.group, batch, rate)
        self._last_loss = loss
        self._steps_done = batch.step + 1
        pause = batch.is_last_of_epoch or self.is_done
        if pause or self._steps_done == 1:
            self.group.synchronise_device()
        self.stopwatch.step_done(batch.size, pause=pause)
        if self.is_done:
            self._finish_strategy()
        if self._step_reports is not None:
            self._step_reports.add(batch, loss, rate)
        reporter.enter(BETWEEN_CALLS)
        return loss

    def _finish_strategy(self) -> None:
        """Lets the strategy do what it has left to do, once."""
        if not self._strategy_finished:
            self._strategy_finished = True
            self._strategy.finished(self.group)

    @property
    def strategy_report(self) -> dict[str, Any]:
        """What the strategy measured so far."""
        return dict(self._strategy.report())

    def report_no_progress(self) -> None:
        """Tells of all steps so far, and of none from here on: reading losses waits for the device. Local."""
        self._flush_step_reports()
        self._step_reports = None

    def metrics(self) -> dict[str, float]:
        """Gives the training metrics over all samples since the last call, and starts them anew."""
        with self._in_call("collect metrics"):
            return self.group.collect_metrics("train")

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Computes loss and metrics over a whole data set.

        Args:
            data: What to evaluate on; the spec's validation data when left out.

        Returns:
            `loss` and each metric: exact means over all samples, whatever the number of replicas.

        Raises:
            DataError: There is no validation data.
        """
        with self._in_call("evaluate"):
            source = self._evaluated_source(data, "evaluate")
            if self.is_main:
                self._reporter.emit(Evaluating())
            with self._strategy.evaluating(self.group):
                for batch in self._loaders.evaluation(source):
                    self._reporter.enter("evaluate")  # anew: timeouts.progress is for each batch
                    self._require_same_samples(batch)
                    self.group.evaluation_step(batch)
            return self.group.collect_metrics("evaluation")

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
        return joined(list(self.predictions(data)))

    def predictions(self, data: Any = None) -> Iterator[Any]:
        """As `predict`, one global batch after the other, so that not all must be in memory at once.

        To be read to its end by every process, without a step in between.
        """
        source = self._evaluated_source(data, "predict")
        if isinstance(source, ShardedStream):
            raise DataError(
                "predict: a stream that shards itself has no order of samples that predictions could be"
                " in. Give the samples as arrays, or as a stream of whole batches."
            )
        with self._strategy.evaluating(self.group):
            for batch in self._loaders.evaluation(source):
                with self._in_call("predict"):
                    self._require_same_samples(batch)
                    found = predicted(self.group, batch)
                yield found

    def _evaluated_source(self, data: Any, call: str) -> Any:
        """What was given, or the spec's validation data.

        Raises:
            DataError: There is neither.
        """
        source = self._loaders.data.validation if data is None else as_source(data)
        if source is None:
            raise DataError(
                f"{call}: the spec's data has no validation part. Return"
                " isotrain.DataSet(train, validation) from the data function, or pass data."
            )
        return source

    def _require_same_samples(self, batch: Batch) -> None:
        """Sees, where a stream says what it gave, that it gave the same to every process.

        Raises:
            DataError: It did not.
        """
        local = len(self.group.local_replicas)
        if batch.fingerprint is None or local == self.replicas:
            return
        both_ways = np.array([batch.fingerprint, -batch.fingerprint], np.float64)
        tensor = self.group.tensor(both_ways)
        largest = self.group.numpy(self.group.all_reduce([tensor] * local, "max")[0])
        if largest[0] != -largest[1]:
            raise DataError(
                f"epoch {batch.epoch}: the processes do not see the same samples. A stream must give every"
                " process the same batches in the same order: give its shuffling a fixed seed, and let"
                " it take no shard of its own."
            )

    @contextlib.contextmanager
    def _in_call(self, call: str) -> Iterator[None]:
        """Lets the launcher know what this process is doing."""
        self._reporter.enter(call)
        yield
        self._reporter.enter(BETWEEN_CALLS)

    @property
    def can_evaluate(self) -> bool:
        """Whether the spec's data has a validation part."""
        return self._loaders.data.validation is not None

    def end_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Adds an epoch's metrics to the run's history, and tells of all its steps."""
        self._flush_step_reports()
        if self.is_main:
            done = self._steps_done
            loss = self._step_reports.epoch_loss() if self._step_reports else self.last_loss
            self._reporter.emit(
                EpochEnded(metrics=dict(metrics), epoch=epoch, done=done, loss=loss)
            )

    def read_state(self, kinds: Sequence[StateKind] = MODEL_STATE) -> dict[str, np.ndarray]:
        """Copies named state to NumPy: weights under their path, slots under `optimizer/`. Local."""
        return self.group.read_state(kinds)

    def write_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets named state on every replica; every process passes the same."""
        self.group.write_state(state)
        self._strategy.state_written(self.group)

    def barrier(self) -> None:
        """Returns once every process has called it."""
        with self._in_call("barrier"):
            self.group.barrier()

    def close(self) -> None:
        """Leaves the run; the session cannot be used afterwards. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._reporter.enter("close")
        self._saver.wait()
        self._finish_strategy()
        self._flush_step_reports()
        self._last_loss = None
        self.group.close()

    def _heard_step_reports(self) -> StepReports | None:
        """Only rank 0 tells of its steps, and only where somebody listens or losses are watched."""
        is_watched = self.spec.on_nan != "ignore"
        if not (self.is_main and (self._reporter.is_heard or is_watched)):
            return None
        watch = LossWatch(self.spec.on_nan, self._reporter, self._culprit)
        return StepReports(self._reporter, self.stopwatch, self.total_steps, watch)

    def _culprit(self, step: int) -> str:
        return culprit(step, self._loaders.samples, self.plan, self.group)

    def _flush_step_reports(self) -> None:
        if self._step_reports is not None:
            self._step_reports.flush()

    def _measured(self) -> Measured:
        weights = self.group.describe_state(("trainable",)).values()
        train = self._loaders.data.train
        return Measured(
            samples=None if isinstance(train, ShardedStream) else len(train),
            parameters=sum(weight.size for weight in weights),
            gradient_bytes=sum(weight.nbytes for weight in weights),
            weight_shapes=[weight.shape for weight in weights],
            remarks=self.remarks(),
        )
