"""Makes the runs of a parity check one at a time, each in new processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from isotrain.analysis.parity import trace as tracing
from isotrain.analysis.parity.bit_trace import BitTrace
from isotrain.analysis.parity.run_trace import RunTrace, assemble_trace
from isotrain.analysis.parity.targets import ParityTarget
from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.job import InternalWork
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError
from isotrain.core.launching.run_directory.run_directory import RunDirectory
from isotrain.core.launching.run_job import run_job
from isotrain.core.launching.scheduler.scheduler_launcher import require_submittable
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.reporting.status import OnProgress, noting_interrupt
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.weight_name_map import NameMap, map_of
from isotrain.core.system.files import make_folder

_OUTPUT = "the output folder"
_FINGERPRINTS = "fingerprints"
NEEDED = (Capability.GRADIENTS, Capability.NAMED_STATE, Capability.SYNCHRONOUS_STEP)
"""Required capabilities; the synchronous step, because all optimizer state is compared."""
_MARKER_FILE = "marker"
"""Marker file in the runs' folder, by which every process checks that it sees the initial weights there."""


class TraceRunner:
    """Makes traced runs; all start from the initial weights of the first one, the reference."""

    def __init__(
        self,
        host: PluginManager,
        reference: ParityTarget,
        steps: int,
        maps: Mapping[str, NameMap],
        output: str | os.PathLike[str] | None,
        on_progress: OnProgress,
        initial: str | None = None,
        work: type[tracing.Trace] = tracing.Trace,
        needed: Collection[Capability] = NEEDED,
    ) -> None:
        """Stores the settings of the runs; starts nothing. Without `output` no results are kept.

        With `initial`, a file of `tracing.INITIAL_FILE`'s form, the reference starts from it too.
        """
        self._needed = needed
        self._host = host
        self._reference = reference
        self._count = steps
        self._maps = maps
        self._output = None if output is None else Path(output)
        self._on_progress = on_progress
        self._initial = initial
        self._work = work
        self._launched = 0
        self._failed = False

    def plan(self, target: ParityTarget, spec: TrainingSpec) -> Plan:
        """Plans a run of the target with another spec.

        Raises:
            PlanError: The run cannot be planned, or the backend lacks a required capability.
        """
        launcher = target.launcher
        plan = make_plan(
            ResolvedSpec(spec, self._host),
            backend=target.backend,
            replicas=target.replicas,
            launcher=launcher,
        )
        require_submittable(self._host.launcher(launcher.name, launcher.options), spec, plan)
        missing = (
            self._host.backend(plan.backend)
            .capabilities_for(plan.parallel_layout)
            .missing(self._needed)
        )
        if missing:
            raise PlanError(
                f"parity needs what {plan.backend!r} lacks: it has {', '.join(missing)}."
            )
        return plan

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which runs are made; deletes their directories on exit, unless a run failed."""
        if self._output is not None:
            make_folder(self._output, _OUTPUT)
        self._folder = self._make_folder()
        try:
            yield
        finally:
            if not self._failed:  # the logs of a failed run are there
                shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self) -> Path:
        """Creates the folder of the run directories: temporary, or in the shared output folder.

        Raises:
            PlanError: The folder cannot be created.
        """
        if self._is_local:
            return _new_folder(None, "Set TMPDIR to a folder that can be.")
        shared = "Give --output (output= in Python) a folder that can be, and that all hosts share."
        folder = _new_folder(self._output or Path(), shared)
        try:
            (folder / _MARKER_FILE).touch()
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise _not_written(folder, error, shared) from error
        return folder

    @property
    def _is_local(self) -> bool:
        return self._reference.launcher.name == LOCAL

    def trace(self, target: ParityTarget, spec: TrainingSpec, note: str) -> RunTrace:
        """Makes one traced run in new processes; `note` says how it differs from the target.

        Raises:
            RunFailedError: The run failed.
        """
        return assemble_trace(target.name, self.returned(target, spec, note))

    def returned(self, target: ParityTarget, spec: TrainingSpec, note: str) -> list[dict[str, Any]]:
        """Values that the processes of such a run return, by rank."""
        plan = self.plan(target, spec)
        names = map_of(self._maps, plan.backend, plan.framework)
        collects_notes = target.spec.strategy != self._reference.spec.strategy
        work = self._work(self._count, names, self._initial, collects_notes, self._marker)
        label = f"{target.name}{f' ({note})' if note else ''}"
        returned, folder = self._run(work, spec, plan, label)
        if self._initial is None:
            self._initial = str(folder / tracing.INITIAL_FILE)
        if self._output is not None:
            kept = RunDirectory(make_folder(self._output / _FINGERPRINTS, _OUTPUT))
            kept.write(f"{self._launched}-{_file_name(label)}.json", {"ranks": returned})
        return returned

    def trace_bits(self, target: ParityTarget) -> list[dict[str, Any]]:
        """Makes one run for `parity --bits`; returns what `BitTrace` returned on each rank.

        Raises:
            RunFailedError: The run failed.
        """
        is_reference = target is self._reference
        work = BitTrace(self._count, str(self._folder / "bits"), is_reference, self._marker)
        plan = self.plan(target, target.spec)
        label = f"{target.name} (the reference)" if is_reference else target.name
        return self._run(work, target.spec, plan, label)[0]

    @property
    def _marker(self) -> str | None:
        return None if self._is_local else str(self._folder / _MARKER_FILE)

    def _run(
        self, work: InternalWork, spec: TrainingSpec, plan: Plan, label: str
    ) -> tuple[list[dict[str, Any]], Path]:
        """Runs the work in new processes; returns what each rank returned, and the run's folder."""
        self._launched += 1
        self._on_progress(f"run {self._launched}: {label}")
        folder = self._folder / str(self._launched)
        folder.mkdir()
        try:
            with noting_interrupt(self._left_by_interrupt()):
                returned = run_job(work, spec, plan, self._host, RunDirectory(folder))
        except IsotrainError as error:
            self._failed = True
            if isinstance(error, RunFailedError):
                raise RunFailedError(f"the run {label} failed: {error}") from error
            raise
        return returned, folder

    def _left_by_interrupt(self) -> str:
        """Note for an interrupt of the current run: what is left of the check, and how to go on."""
        kept = "Nothing is left of the check."
        if self._output is not None and self._launched > 1:
            folder = self._output / _FINGERPRINTS
            kept = f"There is no verdict. The fingerprints of the runs before: {folder}"
        return f"{kept}\nTo start again, use the same command; fewer --steps take less time."

    def keep(self, file: str, text: str) -> None:
        """Writes a text file to the output folder, if there is one."""
        if self._output is None:
            return
        path = self._output / file
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise IsotrainError(f"{path} cannot be written: {error}.") from error


def _new_folder(home: Path | None, instead: str) -> Path:
    try:
        parent = None if home is None else home.absolute()
        return Path(tempfile.mkdtemp(prefix="isotrain-parity-", dir=parent))
    except OSError as error:
        raise _not_written(home or "the folder of temporary files", error, instead) from error


def _not_written(where: Path | str, error: OSError, instead: str) -> PlanError:
    where = "the current folder" if where == Path() else where
    return PlanError(f"parity: {where} cannot be written: {error}. {instead}")


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-@." else "-" for c in label).strip("-")
