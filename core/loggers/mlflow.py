"""The logger `mlflow`: parameters from the plan, and metrics by step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.core.contracts.backend.capabilities import Availability
from isotrain.core.contracts.logger import Logger, MediaKind
from isotrain.core.loggers import requirement

_MAX_METRICS = 1000
"""Number of metrics that MLflow accepts in one request."""
_MAX_CHARACTERS = 500
"""Length of a parameter that every MLflow store accepts."""

_ID_FILE = "mlflow-run-id"
"""File in the run directory, by which a resumed run continues the same MLflow run."""


class MlflowLogger(Logger):
    """Logs to one MLflow run, by the client alone: an active run of this process is left as it is."""

    name = "mlflow"
    summary = "a run of MLflow; needs the extra mlflow"

    def __init__(self, experiment: str = "Default", tracking_uri: str | None = None) -> None:
        """Selects experiment and server.

        Args:
            experiment: Name of the experiment; it is created if it does not exist.
            tracking_uri: Server or store; None for MLflow's own setting.
        """
        self._experiment = experiment
        self._tracking_uri = tracking_uri

    @classmethod
    def availability(cls) -> Availability:
        return requirement.package_availability("mlflow")

    def started(self, plan: Mapping[str, Any], run_directory: Path) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(self._tracking_uri)
        id_file = run_directory / _ID_FILE
        if id_file.exists():
            self._run = id_file.read_text()
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._create_run(plan, run_directory)
        id_file.write_text(self._run)
        self._log_parameters(plan)

    def _create_run(self, plan: Mapping[str, Any], run_directory: Path) -> str:
        """Creates a run, and its experiment if needed; returns the run's id."""
        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = experiment.experiment_id if experiment else None
        if experiment_id is None:
            experiment_id = self._client.create_experiment(self._experiment)
        run = self._client.create_run(
            experiment_id, run_name=plan["run"], tags={"run_directory": str(run_directory)}
        )
        return str(run.info.run_id)

    def _log_parameters(self, plan: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [
            Param(name, str(value)[:_MAX_CHARACTERS])
            for name, value in plan.items()
            if value is not None and not isinstance(value, Mapping)
        ]
        self._client.log_batch(self._run, params=parameters)

    def steps_done(
        self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]
    ) -> None:
        pairs = enumerate(zip(losses, learning_rates, strict=True), first_step)
        self._send([(s, {"loss": loss, "learning_rate": rate}) for s, (loss, rate) in pairs])

    def scalars_logged(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self._send(records)

    def media_logged(self, step: int, name: str, kind: MediaKind, path: Path) -> None:
        self._client.log_artifact(self._run, str(path), f"media/{name}")

    def epoch_ended(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        tagged = {f"epoch/{name}": value for name, value in metrics.items()}
        self._send([(step, {"epoch": epoch, **tagged})])

    def failed(self, message: str) -> None:
        self._client.set_tag(self._run, "failure", message[:_MAX_CHARACTERS])
        self._client.set_terminated(self._run, "FAILED")

    def finished(self, result: Mapping[str, Any] | None) -> None:
        self._client.set_terminated(self._run, "FINISHED")

    def _send(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, step)
            for step, values in records
            for name, value in values.items()
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MAX_METRICS])
