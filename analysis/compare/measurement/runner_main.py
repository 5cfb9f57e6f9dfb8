"""Entry point in another interpreter of a comparison: plans or makes a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotrain.core.errors import PlanError
from isotrain.core.system.version import VERSION


def run_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """Plans a run, or makes it in the task's folder.

    Raises:
        PlanError: The requesting interpreter has another version of isotrain.
    """
    if task["version"] != VERSION:
        raise PlanError(
            f"this is isotrain {VERSION}, and the comparison is made by {task['version']}: they may"
            " measure in different ways. Install the same version in both."
        )
    from isotrain.analysis.compare.measurement.measure import Measurement
    from isotrain.analysis.compare.measurement.runner import plan_here, run_here
    from isotrain.core.spec.loading import load_spec

    spec = load_spec(task["spec"])
    if task["do"] == "plan":
        return plan_here(spec, task["backend"], task["replicas"])
    measurement = Measurement(**task["measurement"])
    folder = Path(task["folder"]) / "run"
    return run_here(spec, task["backend"], task["replicas"], measurement, folder)
