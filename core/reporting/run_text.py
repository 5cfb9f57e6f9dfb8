"""Text of `isotrain runs`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.core.reporting.tables import facts, paragraph, table, text_of


def runs(entries: Sequence[Mapping[str, Any]]) -> str:
    """The runs, one per row, and why some failed."""
    if not entries:
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
    parts = [table(columns, [_run(run) for run in entries])]
    why = [(run["directory"], run["why"]) for run in entries if run["why"]]
    return "\n".join([*parts, *([facts("why", why)] if why else [])])


def _run(run: Mapping[str, Any]) -> tuple[str, ...]:
    has_no_collective = run["collective"] in (None, "none")
    total = f"/{run['total_steps']}" if run["total_steps"] else ""
    return (
        run["directory"],
        run["state"],
        "-"
        if run["backend"] is None
        else run["backend"] + ("" if has_no_collective else f":{run['collective']}"),
        text_of(run["launcher"]),
        text_of(run["replicas"]),
        "-"
        if run["started"] is None
        else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["started"])),
        f"{run['step']}{total}",
        text_of(run["loss"]),
    )
