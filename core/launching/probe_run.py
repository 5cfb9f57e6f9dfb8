"""Looks at a spec's data and model in short runs that leave nothing behind."""

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


def probe_run(work: Work, cast: ResolvedSpec, backend: str, replicas: int | None = 1) -> Any:
    """Gives what `work` returns of a session in rank 0.

    Args:
        work: Called in each process.
        cast: What to load and build.
        backend: Its registered name, also with a collective.
        replicas: How many; None for one per usable GPU, or one.

    Raises:
        RunFailedError: The data cannot be loaded or the model not built; tells why.
    """
    plan = make_plan(cast, backend=backend, replicas=replicas)
    folder = tempfile.mkdtemp(prefix="isotrain-plan-")  # a failure leaves it: its logs are there
    found = run_job(work, cast.spec, plan, cast.host, RunDirectory(Path(folder)))[0]
    shutil.rmtree(folder, ignore_errors=True)
    return found
