"""What a run leaves behind."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.core.errors import IsotrainError

if TYPE_CHECKING:
    import numpy as np

RESULT_FILE = "result.json"
WEIGHTS_FILE = "weights.npz"
FORMAT = 1


@dataclass(frozen=True)
class History:
    """How the training went.

    Attributes:
        loss: Mean loss of every step's global batch.
        learning_rate: The rate of every step.
        epochs: One record per epoch: `epoch`, `step`, the training metrics by name, and evaluation's
            as `validation_<name>`.
    """

    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run.

    Attributes:
        final_loss: Mean loss of the last step's global batch.
        metrics: The last epoch's metrics.
        history: Step by step.
        strategy_report: What the strategy measured; empty for most.
        timings: Seconds, and samples per second, by name; see `docs/results.md`.
        plan: The plan it followed, completed with what was measured.
        versions: Of every package that took part.
        run_directory: Where the run's files are.
    """

    final_loss: float
    metrics: dict[str, float]
    history: History
    timings: dict[str, float]
    plan: dict[str, Any]
    versions: dict[str, str]
    run_directory: Path
    strategy_report: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The final weights by canonical name, optimizer slots left out."""
        import numpy as np

        with np.load(self.run_directory / WEIGHTS_FILE, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values; the weights stay in their file."""
        return {
            "format": FORMAT,
            "final_loss": self.final_loss,
            "metrics": self.metrics,
            "strategy_report": self.strategy_report,
            "timings": self.timings,
            "history": {
                "loss": self.history.loss,
                "learning_rate": self.history.learning_rate,
                "epochs": self.history.epochs,
            },
            "plan": self.plan,
            "versions": self.versions,
            "run_directory": str(self.run_directory),
        }


def read_result(run_directory: str | os.PathLike[str]) -> RunResult:
    """Reads the result that a finished run left in its directory.

    Raises:
        IsotrainError: There is none: the run is not finished, or it was one of `isotrain.launch`.
    """
    path = Path(run_directory) / RESULT_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IsotrainError(
            f"{path} cannot be read: {error}. Only a run that `isotrain run` or isotrain.run finished"
            " has one; its events.jsonl says how far another got."
        ) from error
    return result_from_dict({**fields, "run_directory": str(run_directory)})


def result_from_dict(fields: Mapping[str, Any]) -> RunResult:
    """Makes a result from its plain form."""
    return RunResult(
        final_loss=float(fields["final_loss"]),
        metrics=_floats(fields["metrics"]),
        history=History(
            loss=[float(loss) for loss in fields["history"]["loss"]],
            learning_rate=fields["history"]["learning_rate"],
            epochs=[_floats(record) for record in fields["history"]["epochs"]],
        ),
        timings=fields["timings"],
        plan=fields["plan"],
        versions=fields["versions"],
        run_directory=Path(fields["run_directory"]),
        strategy_report=fields.get("strategy_report", {}),
    )


def _floats(record: Mapping[str, Any]) -> dict[str, float]:
    """Numbers as they were before they became JSON, which has no NaN and writes it as text."""
    return {name: float(v) if isinstance(v, str) else v for name, v in record.items()}
