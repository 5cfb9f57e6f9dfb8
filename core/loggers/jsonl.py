"""The logger `jsonl`: steps and epochs as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import outlasts_rewind
from isotrain.core.contracts.logger import Logger
from isotrain.core.json_format import json_line
from isotrain.core.system.files import rewrite_lines


class JsonLinesLogger(Logger):
    """Writes `metrics.jsonl` in the run directory: an object per step, record of scalars and epoch."""

    name = "jsonl"
    summary = "metrics.jsonl in the run directory: an object per step, record of scalars and epoch"

    def started(self, plan: Mapping[str, Any], run_directory: Path) -> None:
        self._file = run_directory / "metrics.jsonl"
        self._write([])

    def resumed(self, step: int) -> None:
        """Keeps earlier steps, and the evaluations and epochs that had ended by this step."""
        rewrite_lines(self._file, lambda line: line if _is_before(line, step) else None)

    def steps_done(
        self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]
    ) -> None:
        pairs = enumerate(zip(losses, learning_rates, strict=True), first_step)
        self._write(
            {"step": step, "loss": loss, "learning_rate": rate} for step, (loss, rate) in pairs
        )

    def scalars_logged(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self._write({"step": step, **scalars} for step, scalars in records)

    def epoch_ended(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self._write([{"epoch": epoch, "step": step, **metrics}])

    def _write(self, records: Any) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.writelines(json_line(record) + "\n" for record in records)


def _is_before(line: bytes, step: int) -> bool:
    """Whether a line is of an earlier step, or of an evaluation or epoch that had ended by this step."""
    record = json.loads(line)
    if "epoch" in record:
        return bool(record["step"] <= step)
    return outlasts_rewind(record["step"], record, step)
