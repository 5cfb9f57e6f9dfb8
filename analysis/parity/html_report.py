"""A parity check as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from isotrain.analysis.parity import text
from isotrain.analysis.parity.records import ParityRecord, RunRecord
from isotrain.core.reporting.html import html_facts, html_table

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; }
thead th { border-bottom: 1px solid; }
.wide { overflow-x: auto; }
"""


def whole(found: ParityRecord) -> str:
    """The complete HTML page."""
    title = escape(f"Parity of {found.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1>{body(found)}</body></html>\n"
    )


def body(found: ParityRecord) -> str:
    """The page's body, also shown in notebooks."""
    headline = f"{text.HEADLINES[found.verdict]}: {found.summary}"
    runs = "".join(_run(run) for run in found.runs if run.status != "reference")
    table = html_table(text.COLUMNS, text.rows(found))
    noise = _facts("Noise floor: the reference against itself", text.noise(found))
    return f'<p><strong>{escape(headline)}</strong></p>{runs}<div class="wide">{table}</div>{noise}'


def _run(run: RunRecord) -> str:
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
