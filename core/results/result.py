"""The result of a finished run: final loss, metrics, timings, history and weights."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.events import EpochEnded, MembersChanged, Scalars, Steps
from isotrain.core.errors import IsotrainError
from isotrain.core.json_records import read_json, record, value
from isotrain.core.launching.run_directory.run_directory import (
    EVENTS_FILE,
    RESULT_FILE,
    STEPS_FILE,
    read_events,
)
from isotrain.core.session.weights.weights_file import WEIGHTS_FILE, read_weights

if TYPE_CHECKING:
    import numpy as np

    from isotrain.core.contracts.state import ExportForm
    from isotrain.core.spec.loading import SpecLike

FORMAT = 1


@dataclass(frozen=True)
class History:
    """The history of a run, by step and by epoch.

    Attributes:
        loss: Mean loss of every step's global batch; of a step that was taken again, the last. NaN, as the
            rate, for steps that were dropped (with a warning) since the launcher read too slowly.
        learning_rate: Learning rate of every step.
        epochs: One record per epoch: `epoch`, `step`, `loss` (the mean over its samples), the training
            metrics by name, and those of the evaluation as `validation_<name>`.
        scalars: Scalars that `session.log` has recorded, by name and step: `scalars["kl"][7]`.
        members: One record per change of the processes of an elastic run: `done` steps, `lost` (what
            happened, by rank at the start), `joined` and `members` (ranks at the start).
    """

    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    members: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _StoredResult:
    """The fields of a `RunResult` that its file has; the run directory is where that file is."""

    final_loss: float
    last_loss: float
    metrics: dict[str, float]
    strategy_report: dict[str, Any]
    data_read: dict[str, dict[str, int]]
    stopped_early: bool
    timings: dict[str, float]
    plan: dict[str, Any]
    versions: dict[str, str]
    restarts: list[dict[str, Any]]


@dataclass(frozen=True)
class RunResult(_StoredResult):
    """The result of a run.

    Attributes:
        final_loss: Mean loss over the samples of the last epoch, each as it was when it was trained on.
        last_loss: Mean loss of the last step's global batch.
        metrics: Metrics of the last epoch, by name.
        strategy_report: Measurements of the strategy; empty for most.
        data_read: `samples` and `bytes` that each host has read of a training stream, by host; empty for data
            by position.
        stopped_early: Whether the run ended well before its last step: by early stopping, `session.stop` or
            `on_event`.
        timings: Seconds, and samples per second, by name; see `docs/results.md`.
        plan: Plan of the run, completed with measured numbers.
        versions: Version of every package that took part, by name.
        restarts: One record per restart from a checkpoint after a failure: `failure`, `after_step`,
            `from_step` and `replicas`.
        run_directory: Directory of the run's files.
    """

    run_directory: Path

    def __repr__(self) -> str:
        """Final loss, metrics and run directory in one line."""
        measured = {"final loss": self.final_loss, **self.metrics}
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in measured.items())
        return f"<RunResult {numbers} in {self.run_directory}>"

    @functools.cached_property
    def history(self) -> History:
        """The history by step and by epoch, read from the run directory on first use.

        Raises:
            IsotrainError: The run directory, or a file in it, is missing.
        """
        return read_history(self.run_directory)

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The final weights by canonical name, without optimizer state; bfloat16 becomes float32."""
        return read_weights(self.run_directory / WEIGHTS_FILE)

    def export(
        self,
        output: str | os.PathLike[str],
        *,
        to: ExportForm | None = None,
        spec: SpecLike | None = None,
        data: Any = None,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        quiet: bool = False,
    ) -> Path:
        """Exports the trained model to another format; see `isotrain.export`."""
        from isotrain.core.results.predict_and_export import export

        return export(
            self, output, to=to, spec=spec, data=data, include=include, exclude=exclude, quiet=quiet
        )

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values, without history and weights."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": FORMAT, **plain, "run_directory": str(self.run_directory)}


def read_result(run: str | os.PathLike[str]) -> RunResult:
    """Reads the result of a finished run from its run directory.

    Raises:
        IsotrainError: There is no result, since the run has not finished or was one of `isotrain.launch`;
            or its format is not supported.
    """
    path = Path(run) / RESULT_FILE
    try:
        plain = read_json(path)
    except FileNotFoundError as error:
        raise IsotrainError(
            f"{path} cannot be read: {error}. Only a run that `isotrain run` or isotrain.run finished"
            " has one; its events.jsonl says how far another got."
        ) from error
    format_number = plain.get("format") if isinstance(plain, dict) else None
    if format_number != FORMAT:
        raise IsotrainError(
            f"{path}: expected an object with `format` {FORMAT}, received {format_number!r:.60}. Read it with"
            " the isotrain that wrote it, which versions.json beside it names."
        )
    return result_from_dict(plain, Path(run), str(path))


def result_from_dict(
    plain: Mapping[str, Any], run_directory: Path, where: str = "result"
) -> RunResult:
    """Builds a result from the JSON values of `to_dict`; `where` names the file in errors.

    Raises:
        IsotrainError: A field is missing or invalid.
    """
    values = {name: part for name, part in plain.items() if name not in ("format", "run_directory")}
    stored = record(_StoredResult, values, where)
    value(str, plain.get("run_directory"), f"{where}: run_directory")
    return RunResult(**vars(stored), run_directory=run_directory)


def read_history(run_directory: Path) -> History:
    """Reads the steps and epochs that a run has reported.

    Raises:
        IsotrainError: A file is missing.
    """
    for name in (STEPS_FILE, EVENTS_FILE):
        if not (run_directory / name).is_file():
            raise IsotrainError(
                f"{run_directory / name} is missing, which the history is read from. Was the run"
                " directory moved or removed? isotrain.read_result(DIR) reads it where it is now; read"
                " `history` before you remove it."
            )
    history = History()
    steps, epochs = run_directory / STEPS_FILE, run_directory / EVENTS_FILE
    next_step: int | None = None
    for event in read_events(steps):
        if isinstance(event, Steps):
            first = value(int, event.first, f"{steps}: first")
            if next_step is not None and first < next_step:
                del history.loss[first - next_step :], history.learning_rate[first - next_step :]
            gap = [math.nan] * max(0, first - (first if next_step is None else next_step))
            history.loss.extend(gap)
            history.learning_rate.extend(gap)
            next_step = first + len(event.losses)
            rates = value(list[float], event.learning_rates, f"{steps}: learning_rates")
            history.loss.extend(value(list[float], event.losses, f"{steps}: losses"))
            history.learning_rate.extend(rates)
        elif isinstance(event, Scalars):
            _add_scalars(history, event, steps)
    for event in read_events(epochs):
        if isinstance(event, EpochEnded):
            metrics = value(dict[str, float], event.metrics, f"{epochs}: metrics")
            loss = value(float | None, event.loss, f"{epochs}: loss")
            mean_loss = {} if loss is None else {"loss": loss}
            history.epochs.append(
                {"epoch": event.epoch, "step": event.done, **mean_loss, **metrics}
            )
        elif isinstance(event, MembersChanged):
            history.members.append(
                {
                    "done": value(int, event.done, f"{epochs}: done"),
                    "lost": value(dict[str, str], event.lost, f"{epochs}: lost"),
                    "joined": value(list[int], list(event.joined), f"{epochs}: joined"),
                    "members": value(list[int], event.members, f"{epochs}: members"),
                }
            )
    return history


def _add_scalars(history: History, event: Scalars, path: Path) -> None:
    steps = value(list[int], event.steps, f"{path}: steps")
    values = value(list[dict[str, float]], event.values, f"{path}: values")
    for step, scalars in zip(steps, values, strict=True):
        for name, number in scalars.items():
            history.scalars.setdefault(name, {})[step] = number
