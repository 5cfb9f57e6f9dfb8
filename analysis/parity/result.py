"""The result of `isotrain.parity`: its records, as HTML, as a data frame and for notebooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from html import escape
from typing import Any

from isotrain.analysis.parity import text
from isotrain.analysis.parity.records import ParityRecord, RunRecord, StepRecord
from isotrain.core.reporting.html import html_facts, html_table
from isotrain.core.reporting.tables import data_frame

_STYLE = """
:root { color-scheme: light dark; }
_body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; }
thead th { border-bottom: 1px solid; }
.wide { overflow-x: auto; }
"""


class Parity(ParityRecord):
    """All results of one parity check, with conversions to HTML and pandas."""

    def __repr__(self) -> str:
        """The verdict in one line; `to_html` has everything."""
        return f"<Parity {self.verdict}: {self.summary}>"

    def to_html(self) -> str:
        """A self-contained HTML page."""
        return _page(self)

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


def _page(record: ParityRecord) -> str:
    """The complete HTML page."""
    title = escape(f"Parity of {record.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1>{_body(record)}</body></html>\n"
    )


def _body(record: ParityRecord) -> str:
    """The page's body, also shown in notebooks."""
    headline = f"{text.HEADLINES[record.verdict]}: {record.summary}"
    runs = "".join(_run_html(run) for run in record.runs if run.status != "reference")
    table = html_table(text.COLUMNS, text.rows(record))
    noise = _facts("Noise floor: the reference against itself", text.noise(record))
    return f'<p><strong>{escape(headline)}</strong></p>{runs}<div class="wide">{table}</div>{noise}'


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
    return f"<h2>{escape(heading)}</h2>{html_facts(facts)}"
