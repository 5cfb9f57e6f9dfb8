"""Logs to MLflow: parameters from the plan, and metrics by step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.core.contracts.capabilities import Availability
from isotrain.core.contracts.logger import Logger
from isotrain.core.loggers import requirement

_AT_ONCE = 1000
"""Metrics that MLflow takes in one request."""
_LONGEST = 500
"""Characters of a parameter that every MLflow store takes."""

_ID_FILE = "mlflow-run-id"
"""In the run directory: a resumed run goes on in the same run of MLflow."""


class MlflowLogger(Logger):
    """One MLflow run, made with the client alone: no active run of this process is touched."""

    name = "mlflow"
    summary = "a run of MLflow; needs the extra mlflow"

    def __init__(self, experiment: str = "Default", tracking_uri: str | None = None) -> None:
        """Chooses where to log.

        Args:
            experiment: The experiment's name; it is made if there is none.
            tracking_uri: The server or store; left out: MLflow's own setting.
        """
        self._experiment = experiment
        self._tracking_uri = tracking_uri

    @classmethod
    def availability(cls) -> Availability:
        return requirement.package_availability("mlflow")

    def started(self, plan: Mapping[str, Any], run_directory: Path) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(self._tracking_uri)
        known = run_directory / _ID_FILE
        if known.exists():
            self._run = known.read_text()
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._new_run(plan, run_directory)
        known.write_text(self._run)
        self._log_parameters(plan)

    def _new_run(self, plan: Mapping[str, Any], run_directory: Path) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else None
        if experiment is None:
            experiment = self._client.create_experiment(self._experiment)
        run = self._client.create_run(
            experiment, run_name=plan["run"], tags={"run_directory": str(run_directory)}
        )
        return str(run.info.run_id)

    def _log_parameters(self, plan: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [
            Param(name, str(value)[:_LONGEST])
            for name, value in plan.items()
            if value is not None and not isinstance(value, Mapping)
        ]
        self._client.log_batch(self._run, params=parameters)

    def steps_done(
        self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]
    ) -> None:
        pairs = enumerate(zip(losses, learning_rates, strict=True), first_step)
        self._send([(s, {"loss": loss, "learning_rate": rate}) for s, (loss, rate) in pairs])

    def epoch_ended(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        tagged = {f"epoch/{name}": value for name, value in metrics.items()}
        self._send([(step, {"epoch": epoch, **tagged})])

    def failed(self, message: str) -> None:
        self._client.set_tag(self._run, "failure", message[:_LONGEST])
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
        for start in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + _AT_ONCE])
