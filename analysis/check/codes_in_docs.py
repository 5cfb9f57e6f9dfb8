"""Writes the codes into their page: `python -m isotrain.analysis.check.codes_in_docs docs/check.md`."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from isotrain.analysis.check.codes import GROUPS, RULES
from isotrain.analysis.check.rule import Rule

_START, _END = "<!-- codes -->\n", "<!-- /codes -->"
_COLUMNS = 118
"""Maximum line length of a sentence, in characters."""
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?]) (?=[A-Z`]|isotrain |torch's )")


def codes() -> str:
    """Every code with its severity, reason and fix, by group, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for start, about in GROUPS.items():
        yield f"### {start}: {about}\n"
        for rule in RULES.values():
            if rule.group == start:
                yield from _entry(rule)


def _entry(rule: Rule) -> Iterator[str]:
    yield f"#### {rule.code}\n"
    yield f"*{str(rule.severity).capitalize()}*: **{rule.title}.**\n"
    yield f"{_lined(rule.reason)}\n"
    yield f"{_lined(f'What to do: {rule.fix}')}\n"


def _lined(text: str) -> str:
    """A text with one sentence per line, long sentences wrapped."""
    sentences = _BETWEEN_SENTENCES.split(text)
    return "\n".join(
        textwrap.fill(each, _COLUMNS, break_long_words=False, break_on_hyphens=False)
        for each in sentences
    )


def updated(page: str) -> str:
    """The page with the text between its two markers replaced by the current codes."""
    before, _, rest = page.partition(_START)
    _, _, after = rest.partition(_END)
    return f"{before}{_START}{codes()}{_END}{after}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(updated(file.read_text(encoding="utf-8")), encoding="utf-8")
