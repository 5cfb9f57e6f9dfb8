"""The result of `isotrain.parity`: its records, as HTML, as a data frame and for notebooks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from isotrain.analysis.pages.page import write_page
from isotrain.analysis.parity import text
from isotrain.analysis.parity.records import ParityRecord, RunRecord, StepRecord
from isotrain.analysis.parity.report import render
from isotrain.core.reporting.html import html_facts, html_table
from isotrain.core.reporting.tables import data_frame


class Parity(ParityRecord):
    """All results of one parity check, with conversions to HTML and pandas."""

    def __repr__(self) -> str:
        """The verdict in one line; `to_html` has everything."""
        return f"<Parity {self.verdict}: {self.summary}>"

    def to_html(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `report.html` into a folder; returns its path."""
        return write_page(render(self), Path(folder))

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row per run and step.

        Raises:
            IsotrainError: pandas is not installed.
        """
        return data_frame([_row(run, step) for run in self.runs for step in run.steps])

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows."""
        return _body(self)


def _row(run: RunRecord, step: StepRecord) -> dict[str, Any]:
    fields = dataclasses.asdict(step)
    flat = {
        f"{kind}_{stage}": value
        for kind, key in (("difference", "stages"), ("excess", "excess"))
        for stage, value in fields.pop(key).items()
    }
    return {"run": run.name, "status": run.status, **fields, **flat}


def _body(record: ParityRecord) -> str:
    """The HTML that a notebook shows."""
    headline = f"{text.HEADLINES[record.verdict]}: {record.summary}"
    runs = "".join(_run_html(run) for run in record.runs if run.status != "reference")
    page = f"<p><strong>{escape(headline)}</strong></p>{runs}"
    if not record.noise:
        return page
    table = html_table(text.COLUMNS, text.rows(record))
    noise = _facts("Noise floor: the reference against itself", text.noise(record))
    return f'{page}<div class="wide">{table}</div>{noise}'


def _run_html(run: RunRecord) -> str:
    causes = "".join(
        _facts(
            f"Likely cause: {cause.title}",
            [*(("because", line) for line in cause.evidence), ("what to do", cause.advice)],
        )
        for cause in run.causes
    )
    return _facts(f"{run.name}: {run.status}", text.facts_of(run)) + causes


def _facts(heading: str, facts: Iterable[tuple[str, str]]) -> str:
    return f"<h4>{escape(heading)}</h4>{html_facts(facts)}"
