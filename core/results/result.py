"""What a run leaves behind."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.events import EpochEnded, Steps
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
    """How the training went.

    Attributes:
        loss: Mean loss of every step's global batch; NaN, as the rate, where a run that nobody read for
            too long has left steps out, and warned of that.
        learning_rate: The rate of every step.
        epochs: One record per epoch: `epoch`, `step`, `loss` (the mean over its samples), the training
            metrics by name, and evaluation's as `validation_<name>`.
    """

    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class _Written:
    """What of a result is read from its file; the rest is known from where that lies; see `RunResult`."""

    final_loss: float
    metrics: dict[str, float]
    strategy_report: dict[str, Any]
    timings: dict[str, float]
    plan: dict[str, Any]
    versions: dict[str, str]
    restarts: list[dict[str, Any]]


@dataclass(frozen=True)
class RunResult(_Written):
    """The outcome of a run.

    Attributes:
        final_loss: Mean loss of the last step's global batch.
        metrics: The last epoch's metrics.
        strategy_report: What the strategy measured; empty for most.
        timings: Seconds, and samples per second, by name; see `docs/results.md`.
        plan: The plan it followed, completed with what was measured.
        versions: Of every package that took part.
        restarts: One record for each time that the run failed and went on from a checkpoint: `failure`,
            `after_step`, `from_step` and `replicas`.
        run_directory: Where the run's files are.
    """

    run_directory: Path

    def __repr__(self) -> str:
        """In a line; the attributes and `to_dict` have all of it."""
        measured = {"final loss": self.final_loss, **self.metrics}
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in measured.items())
        return f"<RunResult {numbers} in {self.run_directory}>"

    @functools.cached_property
    def history(self) -> History:
        """Step by step and epoch by epoch, read from the run directory on first use.

        Raises:
            IsotrainError: The run directory, or a file in it, is gone.
        """
        return read_history(self.run_directory)

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The final weights by canonical name, optimizer slots left out."""
        return read_weights(self.run_directory / WEIGHTS_FILE)

    def export(
        self,
        target: str | os.PathLike[str],
        *,
        to: ExportForm | None = None,
        spec: SpecLike | None = None,
        data: Any = None,
    ) -> Path:
        """Writes the trained model in a form that others open; see `isotrain.export`."""
        from isotrain.core.results.export import export

        return export(self, target, to=to, spec=spec, data=data)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values; history and weights stay in their files."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": FORMAT, **plain, "run_directory": str(self.run_directory)}


def read_result(run_directory: str | os.PathLike[str]) -> RunResult:
    """Reads the result that a finished run left in its directory.

    Raises:
        IsotrainError: There is none: the run is not finished, or it was one of `isotrain.launch`. Or it
            is none that this version of isotrain writes.
    """
    path = Path(run_directory) / RESULT_FILE
    try:
        plain = read_json(path)
    except FileNotFoundError as error:
        raise IsotrainError(
            f"{path} cannot be read: {error}. Only a run that `isotrain run` or isotrain.run finished"
            " has one; its events.jsonl says how far another got."
        ) from error
    found = plain.get("format") if isinstance(plain, dict) else None
    if found != FORMAT:
        raise IsotrainError(
            f"{path}: expected an object with `format` {FORMAT}, received {found!r:.60}. Read it with the"
            " isotrain that wrote it, which versions.json beside it names."
        )
    return result_from_dict(plain, Path(run_directory), str(path))


def result_from_dict(
    plain: Mapping[str, Any], run_directory: Path, where: str = "result"
) -> RunResult:
    """Makes a result from its plain form.

    Args:
        plain: What `to_dict` gave, also by way of JSON.
        run_directory: Where the run's files are now.
        where: The file that it is from, for messages.

    Raises:
        IsotrainError: It is not as it was given: names the field.
    """
    own = {name: part for name, part in plain.items() if name not in ("format", "run_directory")}
    written = record(_Written, own, where)
    value(str, plain.get("run_directory"), f"{where}: run_directory")
    return RunResult(**vars(written), run_directory=run_directory)


def read_history(run_directory: Path) -> History:
    """Reads the steps and epochs that a run has told of.

    Raises:
        IsotrainError: A file with them is gone.
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
    following: int | None = None
    for event in read_events(steps):
        if isinstance(event, Steps):
            first = value(int, event.first, f"{steps}: first")
            gap = [math.nan] * max(0, first - (first if following is None else following))
            history.loss.extend(gap)
            history.learning_rate.extend(gap)
            following = first + len(event.losses)
            rates = value(list[float], event.learning_rates, f"{steps}: learning_rates")
            history.loss.extend(value(list[float], event.losses, f"{steps}: losses"))
            history.learning_rate.extend(rates)
    for event in read_events(epochs):
        if isinstance(event, EpochEnded):
            metrics = value(dict[str, float], event.metrics, f"{epochs}: metrics")
            loss = value(float | None, event.loss, f"{epochs}: loss")
            mean = {} if loss is None else {"loss": loss}
            history.epochs.append({"epoch": event.epoch, "step": event.done, **mean, **metrics})
    return history
