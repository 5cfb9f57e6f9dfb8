"""The logger `csv`: tables of steps and epochs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import outlasts_rewind
from isotrain.core.contracts.logger import Logger
from isotrain.core.system.files import rewrite_lines


class CsvLogger(Logger):
    """Writes `steps.csv`, `epochs.csv` and, with scalars, `scalars.csv` in the run directory."""

    name = "csv"
    summary = "steps.csv, epochs.csv and scalars.csv in the run directory"

    def started(self, plan: Mapping[str, Any], run_directory: Path) -> None:
        self._steps = run_directory / "steps.csv"
        self._epochs = run_directory / "epochs.csv"
        self._scalars = run_directory / "scalars.csv"
        self._rows: list[dict[str, Any]] = []
        if not self._steps.exists():
            _append(self._steps, [("step", "loss", "learning_rate")])

    def resumed(self, step: int) -> None:
        for path in (self._steps, self._scalars):
            if path.exists():
                rewrite_lines(path, lambda line: line if _is_before(line, step) else None)
        if self._epochs.exists():
            columns, *epochs = _rows(self._epochs)
            rows = (dict(zip(columns, row, strict=True)) for row in epochs)
            self._rows = [row for row in rows if int(row["step"]) <= step]

    def steps_done(
        self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]
    ) -> None:
        steps = range(first_step, first_step + len(losses))
        _append(self._steps, zip(steps, losses, learning_rates, strict=True))

    def scalars_logged(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Appends a row for each scalar: names may come and go, so that they are no columns."""
        if not self._scalars.exists():
            _append(self._scalars, [("step", "name", "value")])
        rows = ((step, *scalar) for step, scalars in records for scalar in scalars.items())
        _append(self._scalars, rows)

    def epoch_ended(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Rewrites the table: an epoch may be the first with a certain metric."""
        self._rows.append({"epoch": epoch, "step": step, **metrics})
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        with self._epochs.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, columns)
            writer.writeheader()
            writer.writerows(self._rows)


def _append(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    with path.open("a", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)


def _is_before(line: bytes, step: int) -> bool:
    """Whether a line of `steps.csv` or `scalars.csv` is its header, or stays after `step` steps."""
    number, name, *_ = line.decode().split(",")
    return number == "step" or outlasts_rewind(int(number), [name.lstrip('"')], step)


def _rows(path: Path) -> list[list[str]]:
    """The complete rows of a table; a last line without its end is left out."""
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return list(csv.reader(lines))
