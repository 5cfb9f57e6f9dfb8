"""The profiled steps of all ranks in one table: what a step and its parts took, on average."""

from __future__ import annotations

import json
from pathlib import Path

from isotrain.core.session.training.step_profiler import FOLDER, STEPS_FILE


def profile_table(run_directory: Path) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the table, a row for each rank whose time line is here; no rows without any.

    Args:
        run_directory: Run directory. Ranks of other hosts are in it if the hosts share it.
    """
    seconds = {
        int(path.parent.name.removeprefix("rank-")): _mean_seconds(path)
        for path in run_directory.glob(f"{FOLDER}/rank-*/{STEPS_FILE}")
    }
    parts = list(dict.fromkeys(part for means, _ in seconds.values() for part in means))
    rows = [
        (str(rank), str(steps), *(_milliseconds(means.get(part)) for part in parts))
        for rank, (means, steps) in sorted(seconds.items())
    ]
    return ("rank", "steps", *(f"{part}, ms" for part in parts)), rows


def _mean_seconds(path: Path) -> tuple[dict[str, float], int]:
    """Mean seconds of the steps of a time line and of each part of them; and the number of steps."""
    totals: dict[str, float] = {}
    steps = 0
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if event["ph"] == "X":
            is_step = event["name"].startswith("step ")
            name = "step" if is_step else event["name"]
            totals[name] = totals.get(name, 0.0) + event["dur"] / 1e6
            steps += is_step
    return {name: total / steps for name, total in totals.items()}, steps


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3f}"
