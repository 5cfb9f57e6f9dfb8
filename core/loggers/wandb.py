"""The logger `wandb`: a run of Weights & Biases."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from isotrain.core.contracts.backend.capabilities import Availability
from isotrain.core.contracts.logger import Logger, MediaKind
from isotrain.core.loggers import requirement

_ID_FILE = "wandb-run-id"
"""File in the run directory, by which a resumed run continues the same Weights & Biases run."""


class WandbLogger(Logger):
    """Logs to one run of Weights & Biases; account and server are those of wandb's settings."""

    name = "wandb"
    summary = "a run of Weights & Biases; needs the extra wandb"

    def __init__(
        self,
        project: str = "isotrain",
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        """Selects project, entity and mode.

        Args:
            project: Name of the project.
            entity: Account or team; None for the default one.
            mode: `offline` keeps the run in the run directory, for `wandb sync`; None for wandb's own
                setting.
        """
        self._project, self._entity = project, entity
        self._mode = mode

    @classmethod
    def availability(cls) -> Availability:
        return requirement.package_availability("wandb")

    def started(self, plan: Mapping[str, Any], run_directory: Path) -> None:
        import wandb

        id_file = run_directory / _ID_FILE
        self._run = wandb.init(
            id=id_file.read_text() if id_file.exists() else None,
            resume="allow",
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            name=plan["run"],
            dir=run_directory,
            config=dict(plan),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        id_file.write_text(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def steps_done(
        self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]
    ) -> None:
        for step, (loss, rate) in enumerate(zip(losses, learning_rates, strict=True), first_step):
            self._run.log({"step": step, "loss": loss, "learning_rate": rate})

    def scalars_logged(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, scalars in records:
            self._run.log({"step": step, **scalars})

    def media_logged(self, step: int, name: str, kind: MediaKind, path: Path) -> None:
        import wandb

        if kind == "image":
            media: Any = wandb.Image(str(path))
        elif kind == "text":
            media = wandb.Html(f"<pre>{html.escape(path.read_text(encoding='utf-8'))}</pre>")
        else:
            histogram = json.loads(path.read_bytes())
            media = wandb.Histogram(np_histogram=(histogram["counts"], histogram["edges"]))
        self._run.log({"step": step, name: media})

    def epoch_ended(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        tagged = {f"epoch/{name}": value for name, value in metrics.items()}
        self._run.log({"step": step, "epoch": epoch, **tagged})

    def failed(self, message: str) -> None:
        self._run.summary["failure"] = message
        self._run.finish(exit_code=1)

    def finished(self, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._run.summary["final_loss"] = result["final_loss"]
        self._run.finish()
