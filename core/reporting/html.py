"""HTML tables for notebooks and reports; all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def html_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table with column headings; line breaks in cells are kept."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_facts(facts: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{_cell(value)}</tr>' for name, value in facts
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _cell(text: str) -> str:
    return f'<td style="white-space: pre-wrap">{escape(text)}</td>'
