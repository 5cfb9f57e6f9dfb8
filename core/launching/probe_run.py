"""Runs a function in a session of a short, temporary run, to examine a spec's data, model and steps."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.core.contracts.backend.adapter_protocols import ABSTRACT, RECORDED
from isotrain.core.contracts.job import Work
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.contracts.plan import Plan
from isotrain.core.launching.local_launcher import LocalLauncher
from isotrain.core.launching.run_directory.run_directory import RunDirectory
from isotrain.core.launching.run_job import JobLauncher, run_job
from isotrain.core.planning.planner import make_plan, resolve_start_method
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.system import hardware


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
    resolved_spec, plan = plan_here(resolved_spec, backend, replicas)
    return _run_in_temporary_folder(work, resolved_spec, plan)


def plan_here(
    resolved_spec: ResolvedSpec, backend: str, replicas: int | None
) -> tuple[ResolvedSpec, Plan]:
    """Plan of a spec, which may be one for GPUs elsewhere, on the devices of this machine; and its spec."""
    if resolved_spec.spec.device == "gpu":
        resolved_spec = ResolvedSpec(
            resolved_spec.spec.replace(device="auto"), resolved_spec.plugins
        )
    return resolved_spec, make_plan(resolved_spec, backend=backend, replicas=replicas)


class _RankZeroLauncher(LocalLauncher):
    """Launcher that starts rank 0 alone."""

    _started_ranks = 1


def probe_rank_zero(
    work: Work, resolved_spec: ResolvedSpec, plan: Plan, *, with_values: bool = True
) -> Any:
    """Runs `work` on rank 0 of a plan, alone and on CPUs, and returns its return value.

    Args:
        work: Function of a session.
        resolved_spec: Spec of the plan.
        plan: Plan of any number of processes and hosts; its backend is a `RecordingBackend`.
        with_values: Whether large tensors have values; those without take no memory, for which the backend
            is an `AbstractBackend`.

    Raises:
        RunFailedError: The work failed, as where it reads values that are not there; says why.
    """
    adapter, spec = resolved_spec.plugins.backend(plan.backend), resolved_spec.spec
    if not with_values:  # what captures or compiles steps reads them
        resolved_spec = ResolvedSpec(
            spec.replace(capture=False, compile=False), resolved_spec.plugins
        )
    threads = hardware.cores()
    on_cpu = replace(
        plan,
        device="cpu",
        launcher=LOCAL,
        launcher_options={},
        collective=RECORDED if with_values else ABSTRACT,
        threads=threads,
        start_method=resolve_start_method(adapter, LOCAL, spec, "cpu"),
        environment_variables=adapter.environment_variables(
            device="cpu", threads=threads, replicas=plan.replicas
        ),
    )
    return _run_in_temporary_folder(work, resolved_spec, on_cpu, _RankZeroLauncher())


def _run_in_temporary_folder(
    work: Work, resolved_spec: ResolvedSpec, plan: Plan, launcher: JobLauncher | None = None
) -> Any:
    folder = tempfile.mkdtemp(prefix="isotrain-plan-")  # stays after a failure: it has the logs
    directory = RunDirectory(Path(folder))
    values = run_job(
        work, resolved_spec.spec, plan, resolved_spec.plugins, directory, launcher=launcher
    )
    shutil.rmtree(folder, ignore_errors=True)
    return values[0]
