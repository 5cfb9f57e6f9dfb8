"""The result of `isotrain.parity`: its records, as HTML, as a data frame and for notebooks."""

from __future__ import annotations

import dataclasses
from typing import Any

from isotrain.analysis.parity import html_report
from isotrain.analysis.parity.records import ParityRecord, RunRecord, StepRecord
from isotrain.core.reporting.tables import data_frame


class Parity(ParityRecord):
    """All results of one parity check, with conversions to HTML and pandas."""

    def __repr__(self) -> str:
        """The verdict in one line; `to_html` has everything."""
        return f"<Parity {self.verdict}: {self.summary}>"

    def to_html(self) -> str:
        """A self-contained HTML page."""
        return html_report.whole(self)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row per run and step.

        Raises:
            IsotrainError: pandas is not installed.
        """
        return data_frame([_row(run, step) for run in self.runs for step in run.steps])

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows."""
        return html_report.body(self)


def _row(run: RunRecord, step: StepRecord) -> dict[str, Any]:
    fields = dataclasses.asdict(step)
    flat = {
        f"{kind}_{stage}": value
        for kind, key in (("difference", "stages"), ("excess", "excess"))
        for stage, value in fields.pop(key).items()
    }
    return {"run": run.name, "status": run.status, **fields, **flat}
