"""A comparison as people hold it: its records, and every way to show them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotrain.core.comparison import flat, report, text
from isotrain.core.comparison.records import (
    COMPARISON_FILE,
    FORMAT,
    ComparisonRecord,
    fields_from,
)
from isotrain.core.errors import IsotrainError
from isotrain.core.showing.data_frame import data_frame


class Comparison(ComparisonRecord):
    """Everything that one comparison measured, as tables, as a report and for notebooks."""

    def to_csv(self) -> str:
        """A row per cell, the ends of every interval in columns of their own."""
        return flat.csv_text(self.cells)

    def to_html(self, folder: str | os.PathLike[str]) -> Path:
        """Writes the report and its plots into a folder; returns the path of the report."""
        return report.write_report(self, Path(folder))

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row per cell, as in `to_csv`.

        Raises:
            IsotrainError: pandas is not installed.
        """
        return data_frame(flat.rows(self.cells))

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return text.html(self)


def from_dict(fields: Mapping[str, Any]) -> Comparison:
    """Makes a comparison of what `Comparison.to_dict` gave."""
    return Comparison(**fields_from(fields))


def read_comparison(path: Path) -> Comparison:
    """Reads a comparison from its folder, or from the JSON file itself.

    Raises:
        IsotrainError: It is missing, is not a comparison, or is of another format.
    """
    file = path / COMPARISON_FILE if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise IsotrainError(
            f"there is no comparison at {file}; `isotrain compare SPEC --output DIR` writes one."
        ) from None
    except (OSError, ValueError) as error:
        raise IsotrainError(f"{file} cannot be read as a comparison: {error}.") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
        raise IsotrainError(f"{file}: expected a comparison of format {FORMAT}, found {found!r}.")
    return from_dict(fields)
