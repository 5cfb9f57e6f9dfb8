"""Makes the runs of a check of parity, one after the other, each in processes of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from isotrain.analysis.parity import trace as tracing
from isotrain.analysis.parity.run_trace import RunTrace, assemble_trace
from isotrain.analysis.parity.targets import ParityTarget
from isotrain.core.contracts.capabilities import Capability
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError
from isotrain.core.launching.run_directory.run_directory import RunDirectory
from isotrain.core.launching.run_job import run_job
from isotrain.core.launching.scheduler.scheduler_launcher import require_submittable
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.weight_name_map import NameMap, map_of
from isotrain.core.system.files import make_folder

Say = Callable[[str], None]
_OUTPUT = "the output folder"
NEEDED = (Capability.GRADIENTS, Capability.NAMED_STATE, Capability.SYNCHRONOUS_STEP)
"""The last one, as it compares all slots, which a replica that does not update all weights has not."""
_SEEN_FILE = "seen"
"""In the folder of the runs: who sees it sees also the initial weights that one of them leaves there."""


class TraceRunner:
    """Every run that it makes starts from the initial weights of the first, which is the reference."""

    def __init__(
        self,
        host: PluginManager,
        reference: ParityTarget,
        steps: int,
        maps: Mapping[str, NameMap],
        output: str | os.PathLike[str] | None,
        say: Say | None,
    ) -> None:
        """Prepares.

        Args:
            host: Knows the backends.
            reference: The first run.
            steps: How many to trace.
            maps: Which tensor is which, by backend or framework.
            output: A folder for what is kept; None: nothing is.
            say: Called with a line before each run.
        """
        self._host = host
        self._reference = reference
        self._count = steps
        self._maps = maps
        self._output = None if output is None else Path(output)
        self._say = say or (lambda line: None)
        self._initial: str | None = None
        self._launched = 0
        self._failed = False

    def plan(self, wanted: ParityTarget, spec: TrainingSpec) -> Plan:
        """The plan of a run, under a spec of its own.

        Raises:
            PlanError: It cannot be made, or the backend does not show what is compared.
        """
        chosen = wanted.launcher
        plan = make_plan(
            ResolvedSpec(spec, self._host),
            backend=wanted.backend,
            replicas=wanted.replicas,
            launcher=chosen,
        )
        require_submittable(self._host.launcher(chosen.name, chosen.options), spec, plan)
        missing = (
            self._host.backend(plan.backend).capabilities_for(plan.parallel_layout).missing(NEEDED)
        )
        if missing:
            raise PlanError(
                f"parity needs what {plan.backend!r} lacks: it has {', '.join(missing)}."
            )
        return plan

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within it, runs can be made; their directories go with it, but for those of a failed check."""
        if self._output is not None:
            make_folder(self._output, _OUTPUT)
        self._folder = self._own_folder()
        try:
            yield
        finally:
            if not self._failed:  # the logs of a failed run are there
                shutil.rmtree(self._folder, ignore_errors=True)

    def _own_folder(self) -> Path:
        """A new one for the runs' directories, among this machine's temporary files or where hosts see it.

        Raises:
            PlanError: It cannot be made.
        """
        if self._is_local:
            return _new_folder(None, "Set TMPDIR to a folder that can be.")
        shared = "Give --output (output= in Python) a folder that can be, and that all hosts share."
        folder = _new_folder(self._output or Path(), shared)
        try:
            (folder / _SEEN_FILE).touch()
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise _not_written(folder, error, shared) from error
        return folder

    @property
    def _is_local(self) -> bool:
        return self._reference.launcher.name == LOCAL

    def trace(self, wanted: ParityTarget, spec: TrainingSpec, note: str) -> RunTrace:
        """Makes one run in processes of its own.

        Args:
            wanted: The run.
            spec: What it trains, if in another way than was wanted.
            note: Which way that is; may be empty.

        Raises:
            RunFailedError: It failed; says which run it was.
        """
        self._launched += 1
        label = f"{wanted.name}{f' ({note})' if note else ''}"
        self._say(f"run {self._launched}: {label}")
        plan = self.plan(wanted, spec)
        folder = self._folder / str(self._launched)
        folder.mkdir()
        names = map_of(self._maps, plan.backend, plan.framework)
        asks = wanted.spec.strategy != self._reference.spec.strategy
        seen = None if self._is_local else str(self._folder / _SEEN_FILE)
        work = tracing.Trace(self._count, names, self._initial, asks, seen)
        try:
            returned = run_job(work, spec, plan, self._host, RunDirectory(folder))
        except IsotrainError as error:
            self._failed = True
            if isinstance(error, RunFailedError):
                raise RunFailedError(f"the run {label} failed: {error}") from error
            raise
        if self._initial is None:
            self._initial = str(folder / tracing.INITIAL_FILE)
        if self._output is not None:
            kept = RunDirectory(make_folder(self._output / "fingerprints", _OUTPUT))
            kept.write(f"{self._launched}-{_file_name(label)}.json", {"ranks": returned})
        return assemble_trace(wanted.name, returned)

    def keep(self, file: str, text: str) -> None:
        """Writes a file beside the fingerprints, if these are kept."""
        if self._output is None:
            return
        path = self._output / file
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise IsotrainError(f"{path} cannot be written: {error}.") from error


def _new_folder(home: Path | None, instead: str) -> Path:
    try:
        place = None if home is None else home.absolute()
        return Path(tempfile.mkdtemp(prefix="isotrain-parity-", dir=place))
    except OSError as error:
        raise _not_written(home or "the folder of temporary files", error, instead) from error


def _not_written(where: Path | str, error: OSError, instead: str) -> PlanError:
    where = "the current folder" if where == Path() else where
    return PlanError(f"parity: {where} cannot be written: {error}. {instead}")


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-@." else "-" for c in label).strip("-")
