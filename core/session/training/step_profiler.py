"""Profiling of some steps by the framework's profiler, and the time line of these: `profile` of the spec."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from isotrain.core.contracts.backend.group_protocols import ActionTimingGroup, ProfilingGroup
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.contracts.backend.step_actions import step_actions
from isotrain.core.errors import SpecError
from isotrain.core.pipeline.executor import ExecutedAction
from isotrain.core.quantities import counted
from isotrain.core.session.training.context import SessionContext
from isotrain.core.system.trace_events import Span, write_trace

FOLDER = "profile"
"""Folder in the run directory, with a folder for each profiled rank."""
STEPS_FILE = "steps.json"
"""File of a rank's folder: the time line of the profiled steps, for Perfetto."""


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
        self._track = f"rank {rank}"
        self._folder = run_directory / FOLDER / f"rank-{rank}"
        self._begins: list[float] = []
        self._spans: list[Span] = []
        self._stop: Callable[[], None] | None = None
        self._steps = self._timed_steps = range(0)
        self._is_timing = False
        if profile is None:
            return
        if profile.first_step >= total_steps:
            raise SpecError(
                f"profile.first_step: {profile.first_step}: the run has {counted(total_steps, 'step')}, which"
                " count from 0. Name an earlier one."
            )
        group = require(self._group, ProfilingGroup)
        last = profile.first_step + profile.steps
        self._timed_steps = range(
            profile.first_step - 1, last
        )  # the one before traces TensorFlow's step
        if profile.all_processes or rank == 0:
            self._start = group.start_profile
            self._steps = range(profile.first_step, last)

    def before_step(self, step: int) -> None:
        """Starts the profiler before the first of the steps, which after a resume may be a later one.

        All processes time the same steps, for those of TensorFlow are other traced functions.
        """
        is_timed = step in self._timed_steps
        if is_timed != self._is_timing and isinstance(self._group, ActionTimingGroup):
            self._group.set_action_timing(is_timed)
            self._is_timing = is_timed
        if self._stop is None and step in self._steps:
            self._group.synchronize_device()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stop = self._start(self._folder)
        if self._stop is not None:
            self._begins.append(time.perf_counter())

    def after_step(self, step: int) -> None:
        """Stops the profiler after the last of the steps."""
        if self._stop is None:
            return
        begin, end = self._begins[-1], time.perf_counter()
        actions = step_actions(self._group, begin, end)
        for each in (ExecutedAction(f"step {step}", begin, end), *actions):
            start = each.begin - self._begins[0]
            self._spans.append(Span(self._track, each.name, start, each.end - each.begin))
        if step + 1 >= self._steps.stop:
            self.stop()

    def stop(self) -> None:
        """Stops the profiler, if it is running, and writes its traces; no later step starts it again."""
        if self._stop is not None:
            self._group.synchronize_device()
            self._stop()
            write_trace({self._track: self._spans}, self._folder / STEPS_FILE)
            self._stop, self._steps = None, range(0)
