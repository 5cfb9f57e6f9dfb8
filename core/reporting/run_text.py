"""Runs that were recorded, as text for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.core.reporting.tables import facts, paragraph, table, text_of


def runs(found: Sequence[Mapping[str, Any]]) -> str:
    """The runs, one a row, and why some failed."""
    if not found:
        return paragraph("There are no runs.")
    columns = (
        "run directory",
        "state",
        "backend",
        "launcher",
        "replicas",
        "started",
        "step",
        "loss",
    )
    parts = [table(columns, [_run(run) for run in found])]
    why = [(run["directory"], run["why"]) for run in found if run["why"]]
    return "\n".join([*parts, *([facts("why", why)] if why else [])])


def _run(run: Mapping[str, Any]) -> tuple[str, ...]:
    collective = run["collective"] in (None, "none")
    total = f"/{run['total_steps']}" if run["total_steps"] else ""
    return (
        run["directory"],
        run["state"],
        "-"
        if run["backend"] is None
        else run["backend"] + ("" if collective else f":{run['collective']}"),
        text_of(run["launcher"]),
        text_of(run["replicas"]),
        "-"
        if run["started"] is None
        else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["started"])),
        f"{run['step']}{total}",
        text_of(run["loss"]),
    )
