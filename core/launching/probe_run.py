"""Runs a function in a session of a short, temporary run, to examine a spec's data and model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from isotrain.core.contracts.job import Work
from isotrain.core.launching.run_directory.run_directory import RunDirectory
from isotrain.core.launching.run_job import run_job
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.resolved_spec import ResolvedSpec


def probe_run(
    work: Work, resolved_spec: ResolvedSpec, backend: str, replicas: int | None = 1
) -> Any:
    """Runs `work` in a temporary run, and returns rank 0's return value.

    Args:
        work: Function of a session, called on every rank.
        resolved_spec: Spec with the data to load and the model to build.
        backend: `NAME` or `NAME:COLLECTIVE`.
        replicas: Number of replicas; None: one per usable GPU, or one.

    Raises:
        RunFailedError: The data cannot be loaded or the model cannot be built; says why.
    """
    if resolved_spec.spec.device == "gpu":  # the plan may be one for hosts elsewhere
        resolved_spec = ResolvedSpec(
            resolved_spec.spec.replace(device="auto"), resolved_spec.plugins
        )
    plan = make_plan(resolved_spec, backend=backend, replicas=replicas)
    folder = tempfile.mkdtemp(prefix="isotrain-plan-")  # stays after a failure: it has the logs
    values = run_job(
        work, resolved_spec.spec, plan, resolved_spec.plugins, RunDirectory(Path(folder))
    )
    shutil.rmtree(folder, ignore_errors=True)
    return values[0]
