"""Profiling of some steps by the framework's profiler: `profile` of the spec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isotrain.core.contracts.backend.group_protocols import ProfilingGroup
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.errors import SpecError
from isotrain.core.session.training.context import SessionContext

FOLDER = "profile"
"""Folder in the run directory, with a folder for each profiled rank."""


class StepProfiler:
    """Starts and stops the profiler of one process, once in a run. Local."""

    def __init__(
        self, session_context: SessionContext, rank: int, run_directory: Path, total_steps: int
    ) -> None:
        """Profiles nothing without `profile` in the spec, or on a rank that it leaves out.

        Raises:
            SpecError: The run ends before the first step to profile.
            UnsupportedError: The backend has no profiler.
        """
        profile = session_context.spec.profile
        self._group = session_context.group
        self._folder = run_directory / FOLDER / f"rank-{rank}"
        self._stop: Callable[[], None] | None = None
        self._steps = range(0)
        if profile is None:
            return
        if profile.first_step >= total_steps:
            raise SpecError(
                f"profile.first_step: {profile.first_step}: the run has {total_steps} steps, which count from"
                " 0. Name an earlier one."
            )
        group = require(self._group, ProfilingGroup)
        if profile.all_processes or rank == 0:
            self._start = group.start_profile
            self._steps = range(profile.first_step, profile.first_step + profile.steps)

    def before_step(self, step: int) -> None:
        """Starts the profiler before the first of the steps, which after a resume may be a later one."""
        if self._stop is None and step in self._steps:
            self._group.synchronize_device()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stop = self._start(self._folder)

    def after_step(self, step: int) -> None:
        """Stops the profiler after the last of the steps."""
        if self._stop is not None and step + 1 >= self._steps.stop:
            self.stop()

    def stop(self) -> None:
        """Stops the profiler, if it is running, and writes its traces; no later step starts it again."""
        if self._stop is not None:
            self._group.synchronize_device()
            self._stop()
            self._stop, self._steps = None, range(0)
