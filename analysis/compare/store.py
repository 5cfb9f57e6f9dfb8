"""The output folder of a comparison: written atomically, read to resume or to report again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotrain.analysis.compare.records import COMPARISON_FILE, ComparisonRecord
from isotrain.analysis.compare.result import Comparison
from isotrain.analysis.pages.page import has_packages
from isotrain.core.errors import PlanError, RunFailedError
from isotrain.core.system.files import atomic_write

CSV_FILE = "comparison.csv"
RUNS_FOLDER = "runs"
COMPARISONS_VARIABLE = "ISOTRAIN_COMPARISONS"
"""Environment variable with the folder in which new comparisons are made."""
_FREE_SETTINGS = {"repeats", "time_budget_s", "run_seconds", "spent_s", "margin"}
"""Settings that may differ on resume: how much is measured, not how."""
_MACHINE = ("system", "processor", "cores", "gpus")


def new_folder(name: str, folder: str | os.PathLike[str] | None) -> Path:
    """Creates the folder of a new comparison; `folder=None` means `comparisons/<name>-<time>`.

    Raises:
        PlanError: The folder is not empty, or cannot be created.
    """
    path = Path(folder) if folder is not None else _free_path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = any(path.iterdir())
    except OSError as error:
        raise PlanError(f"the folder of the comparison cannot be made: {error}.") from error
    if taken:
        hint = f"go on with it by --resume {path}, or " if (path / COMPARISON_FILE).exists() else ""
        raise PlanError(f"--output {path}: the folder is not empty; {hint}choose another.")
    return path.resolve()


def _free_path(name: str) -> Path:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(os.environ.get(COMPARISONS_VARIABLE) or "comparisons")
    path, number = folder / stem, 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}"
    return path


def write(comparison: ComparisonRecord, folder: Path) -> None:
    """Writes `comparison.json` atomically; a `RunFailedError` says that it cannot be written."""
    _replace(folder / COMPARISON_FILE, comparison.to_json())


def publish(comparison: Comparison, folder: Path) -> Path | None:
    """Writes `comparison.csv` and the HTML report; its path, or None without the packages that it needs."""
    _replace(folder / CSV_FILE, comparison.to_csv())
    if not has_packages():
        return None
    return comparison.to_html(folder)


def _replace(target: Path, text: str) -> None:
    try:
        atomic_write(target, text)
    except OSError as error:
        raise RunFailedError(f"{target} cannot be written: {error}.") from error


def check_same(stored: ComparisonRecord, wanted: ComparisonRecord, folder: Path) -> None:
    """Refuses to resume a comparison with another spec, machine, grid or way of measuring.

    Raises:
        PlanError: The two differ; the message lists the differences.
    """
    differing = [
        *_differing("spec", _plain(stored.spec), _plain(wanted.spec)),
        *_differing("settings", _plain(stored.settings), _plain(wanted.settings)),
        *_differing(
            "machine", *({n: c.machine.get(n) for n in _MACHINE} for c in (stored, wanted))
        ),
    ]
    names = [cell.name for cell in stored.cells]
    if names != [cell.name for cell in wanted.cells]:
        differing.append(f"cells were {', '.join(names)}")
    if differing:
        raise PlanError(
            f"--resume {folder}: it holds a comparison of something else: {'; '.join(differing)}. Ask"
            " for the same, or start a new comparison in another folder."
        )


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return plain


def _differing(what: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    return [
        f"{what}.{name} was {one.get(name)!r}, now {two.get(name)!r}"
        for name in sorted({*one, *two} - _FREE_SETTINGS)
        if one.get(name) != two.get(name)
    ]
