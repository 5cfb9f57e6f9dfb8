"""Runs everything that a check of parity needs, one after the other, and puts the records together."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.core.contracts.capabilities import Capability
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError
from isotrain.core.launching.run_directory import RunDirectory
from isotrain.core.launching.run_job import run_job
from isotrain.core.parity import trace as tracing
from isotrain.core.parity.judge import judge, step_records
from isotrain.core.parity.noise import Floor, Noise, scale_between
from isotrain.core.parity.parity import Parity
from isotrain.core.parity.records import PARITY_FILE, STAGES, NoiseRecord, RunRecord
from isotrain.core.parity.runs import RunTrace, furthest_start, not_compared, put_together
from isotrain.core.planning.make_plan import make_plan
from isotrain.core.planning.own_place import require_alone
from isotrain.core.plugins.cast import Cast
from isotrain.core.plugins.host import PluginHost, plugin_host
from isotrain.core.spec.files import SpecLike, load_spec
from isotrain.core.spec.name_maps import MapLike, NameMap, read_maps
from isotrain.core.spec.parts import StrategyChoice, StrategyLike
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware
from isotrain.core.system.versions import versions

Say = Callable[[str], None]
NEEDED = (Capability.GRADIENTS, Capability.NAMED_STATE, Capability.SYNCHRONISED_STEP)
"""The last one, as it compares all slots, which a replica that does not update all weights has not."""
DEFAULT_STEPS = 10
SAME_START = 1e-6
"""Initial weights that are further apart are told of."""


@dataclass(frozen=True)
class Wanted:
    """A run that was asked for.

    Attributes:
        backend: `NAME[:COLLECTIVE]`.
        replicas: How many.
        strategy: `NAME[,OPTION=VALUE...]`.
        name: What it is called; has the strategy where there are several.
        spec: What it trains.
    """

    backend: str
    replicas: int
    strategy: str
    name: str
    spec: TrainingSpec


def parity(
    spec: SpecLike,
    *,
    backends: Sequence[str],
    replicas: Sequence[int] = (1,),
    strategies: Sequence[StrategyLike] | None = None,
    steps: int = DEFAULT_STEPS,
    map: MapLike | None = None,
    output: str | os.PathLike[str] | None = None,
    say: Say | None = None,
) -> Parity:
    """Finds the first step and the first tensor at which runs of one spec part, and says why.

    Args:
        spec: A `TrainingSpec`, a mapping of its fields, or a YAML, TOML or JSON file.
        backends: Each `NAME` or `NAME:COLLECTIVE`; the first with the first number of replicas is the
            reference.
        replicas: Each backend runs with each of these numbers.
        strategies: And under each of these, a name or `{"name": ..., "options": {...}}`; the first is the
            reference's. Left out: under the spec's.
        steps: How many steps to trace. The last of them is the first smaller global batch of the run
            where that comes later.
        map: For native models: which tensor is which, a mapping or a YAML or JSON file; see
            `docs/parity.md`.
        output: A folder to write `parity.json` and the fingerprints of each run to.
        say: Called with a line before each run.

    Returns:
        The verdict, and records of every run.

    Raises:
        SpecError: The spec or the map is wrong.
        PlanError: Spec, backends and replicas do not fit together.
        UnsupportedError: An engine has started this process with others.
        RunFailedError: The reference failed. Other runs that fail are told in their records.
    """
    require_alone("parity")
    given = load_spec(spec)
    wanted = _wanted(given, backends, replicas, strategies or [given.strategy.name])
    return _Check(given, wanted, steps, map, output, say).run()


def _wanted(
    spec: TrainingSpec,
    backends: Sequence[str],
    replicas: Sequence[int],
    strategies: Sequence[StrategyLike],
) -> list[Wanted]:
    """Every run, each once, the reference first."""
    found = {}
    for choice in map(StrategyChoice.of, strategies):
        for count in replicas:
            for backend in backends:
                name = f"{backend}@{count}" + (f" {choice.label}" if len(strategies) > 1 else "")
                own = spec.under(choice)
                found[name] = Wanted(backend, count, own.strategy.label, name, own)
    if len(found) < 2:
        raise PlanError(
            "parity: there is nothing to compare. Name two backends (--backend A --backend B), two"
            " numbers of replicas (--replicas 1,2) or two strategies (--strategy A --strategy B)."
        )
    return list(found.values())


class _Check:
    """One check of parity."""

    def __init__(
        self,
        spec: TrainingSpec,
        wanted: Sequence[Wanted],
        steps: int,
        map: MapLike | None,
        output: str | os.PathLike[str] | None,
        say: Say | None,
    ) -> None:
        if steps < 1:
            raise PlanError(f"parity: steps: expected at least 1, received {steps}.")
        self._spec = spec
        self._host = plugin_host(spec.plugins)
        self._maps = read_maps(map)
        self._count = steps
        self._say = say or (lambda line: None)
        self._created = time.time()
        self._wanted = wanted
        for each in wanted:
            self._plan(each, each.spec)
        self._output = None if output is None else _made(Path(output))
        self._initial: str | None = None
        self._launched = 0
        self._failed = False

    def run(self) -> Parity:
        """Makes every run."""
        self._folder = Path(tempfile.mkdtemp(prefix="isotrain-parity-"))
        try:
            result = self._compared()
        finally:
            if not self._failed:  # the logs of a failed run are there
                shutil.rmtree(self._folder, ignore_errors=True)
        if self._output is not None:
            _write(self._output / PARITY_FILE, result.to_json())
        return result

    def _compared(self) -> Parity:
        first, *others = self._wanted
        self._reference = self._traced(first, first.spec, "the reference")
        self._noise_records: list[NoiseRecord] = []
        self._other = self._noise(first, "other precision", _other_precision(first.spec))
        threads = self._noise(first, "other threads", self._other_threads(first.spec))
        floor = Floor(self._reference, _noises(self._reference, self._other, threads))
        runs = [self._reference_record(first, floor)]
        runs += [self._judged(wanted, floor) for wanted in others]
        return Parity(
            name=self._spec.name,
            **_verdict(runs),
            spec=self._spec.to_dict(),
            reference=first.name,
            created=self._created,
            steps=[step.step for step in self._reference.steps],
            noise=self._noise_records,
            runs=runs,
            machine=hardware.describe(),
            versions=versions(self._packages()),
        )

    def _packages(self) -> list[str]:
        """Of every backend that takes part."""
        names = {split_backend(wanted.backend)[0]: None for wanted in self._wanted}
        return [package for name in names for package in self._host.backend(name).packages]

    def _other_threads(self, spec: TrainingSpec) -> TrainingSpec:
        threads = self._reference.plan["threads"]
        return spec.replace(threads=1 if threads > 1 else 2)

    def _noise(self, wanted: Wanted, source: str, spec: TrainingSpec) -> RunTrace | None:
        """Runs the reference otherwise; a failure is noted, and the floor rests on what is left."""
        threads = f"{spec.threads} thread{'s' if spec.threads != 1 else ''}"
        about = spec.precision if source == "other precision" else threads
        try:
            found = self._traced(wanted, spec, f"the reference with {about}")
        except IsotrainError as error:
            self._noise_records.append(NoiseRecord(source, about, failed=str(error)))
            return None
        only = Floor(self._reference, _noises(self._reference, found))
        largest: dict[str, float] = {stage: only.largest(stage) for stage in STAGES}
        self._noise_records.append(NoiseRecord(source, about, largest))
        return found

    def _reference_record(self, wanted: Wanted, floor: Floor) -> RunRecord:
        return RunRecord(
            name=wanted.name,
            backend=wanted.backend,
            replicas=wanted.replicas,
            strategy=wanted.strategy,
            status="reference",
            reason="all others are compared with it.",
            steps=step_records(self._reference, self._reference, floor),
            plan=self._reference.plan,
        )

    def _judged(self, wanted: Wanted, floor: Floor) -> RunRecord:
        common = {
            name: getattr(wanted, name) for name in ("name", "backend", "replicas", "strategy")
        }
        try:
            run = self._traced(wanted, wanted.spec, "")
        except IsotrainError as error:
            return RunRecord(**common, status="failed", reason=str(error))
        remarks: list[str] = []
        again = functools.partial(self._clearer, wanted, remarks)
        found = judge(wanted.spec, run, self._reference, floor, self._other, again)
        return RunRecord(
            **common,
            status=found.status,
            reason=found.reason,
            first=found.first,
            parted=found.parted,
            causes=found.causes,
            confirmed=found.confirmed,
            steps=step_records(run, self._reference, floor),
            remarks=[
                *remarks,
                *self._about_strategy(wanted, run),
                *_remarks(run, self._reference, floor),
            ],
            plan=run.plan,
        )

    def _clearer(
        self, wanted: Wanted, remarks: list[str]
    ) -> tuple[RunTrace, RunTrace, Floor] | None:
        """The run and the reference in float64, to confirm a difference with; adds to remarks why not."""
        if self._other is None:
            remarks.append("the reference has no float64 run to confirm the difference with.")
            return None
        try:
            clearer = self._traced(wanted, _in_float64(wanted.spec), "in float64, to be sure")
        except IsotrainError as error:
            remarks.append(f"it could not be confirmed in float64: {error}")
            return None
        noises = _noises(self._other, self._reference)
        return clearer, self._other, Floor(self._other, noises)

    def _about_strategy(self, wanted: Wanted, run: RunTrace) -> list[str]:
        """Says where the run and the reference are not even meant to train alike, or take steps otherwise."""
        choices = (wanted.spec.strategy, self._wanted[0].spec.strategy)
        if choices[0] == choices[1]:
            return []
        own_way = [
            choice.label
            for choice in choices
            if not self._host.strategy(choice.name, choice.options).equals_data_parallel
        ]
        promise = (
            "not meant to train as data-parallel does: what parts there is no fault of a backend"
        )
        return [*(f"{label} is {promise}." for label in own_way), *run.remarks]

    def _plan(self, wanted: Wanted, spec: TrainingSpec) -> Plan:
        plan = make_plan(Cast(spec, self._host), backend=wanted.backend, replicas=wanted.replicas)
        _require_capabilities(plan, self._host)
        return plan

    def _traced(self, wanted: Wanted, spec: TrainingSpec, note: str) -> RunTrace:
        """Makes one run in processes of its own.

        Raises:
            RunFailedError: It failed; says which run it was.
        """
        self._launched += 1
        label = f"{wanted.name}{f' ({note})' if note else ''}"
        self._say(f"run {self._launched}: {label}")
        plan = self._plan(wanted, spec)
        folder = self._folder / str(self._launched)
        folder.mkdir()
        names = self._maps.get(plan.backend) or self._maps.get(plan.framework) or NameMap({})
        asks = wanted.spec.strategy != self._wanted[0].spec.strategy
        request = tracing.Request(self._count, names, self._initial, asks)
        work = functools.partial(tracing.trace, request=request)
        try:
            returned = run_job(work, spec, plan, self._host, RunDirectory(folder))
        except RunFailedError as error:
            self._failed = True
            raise RunFailedError(f"the run {label} failed: {error}") from error
        if self._initial is None:
            self._initial = str(folder / tracing.INITIAL_FILE)
        if self._output is not None:
            kept = RunDirectory(_made(self._output / "fingerprints"))
            kept.write(f"{self._launched}-{_file_name(label)}.json", {"ranks": returned})
        return put_together(wanted.name, returned)


def _other_precision(spec: TrainingSpec) -> TrainingSpec:
    return spec.replace(precision="float32") if spec.precision == "float64" else _in_float64(spec)


def _in_float64(spec: TrainingSpec) -> TrainingSpec:
    changes = {} if spec.loss_scale is None else {"loss_scale": None}
    return spec.replace(precision="float64", **changes)


def _noises(reference: RunTrace, *runs: RunTrace | None) -> list[Noise]:
    return [Noise(run, scale_between(run, reference)) for run in runs if run is not None]


def _verdict(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The verdict over all runs, and its sentence."""
    reference, *others = runs
    parted = [run.name for run in others if run.status == "difference"]
    failed = [run.name for run in others if run.status == "failed"]
    if parted:
        summary = f"{_list(parted)} {_does(parted)} not train like {reference.name}."
        return {"verdict": "difference", "summary": summary}
    if failed:
        return {"verdict": "failed", "summary": f"{_list(failed)} failed; see the reason."}
    equal = all(run.status == "equal" for run in others)
    how = "every number is the same" if equal else "what differs is rounding"
    names = [run.name for run in others]
    verb = "trains" if len(names) == 1 else "train"
    return {"verdict": "agree", "summary": f"{_list(names)} {verb} like {reference.name}: {how}."}


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _does(names: Sequence[str]) -> str:
    return "does" if len(names) == 1 else "do"


def _remarks(run: RunTrace, reference: RunTrace, floor: Floor) -> list[str]:
    found = [
        f"not compared, because the reference has no such {STAGES[stage]}: {', '.join(names)}"
        for stage, names in not_compared(run, reference).items()
    ]
    if not run.steps[0].tensors["reduced"]:
        found.append("this backend does not show the gradients after the reduction.")
    name, apart = furthest_start(run, reference)
    if apart > SAME_START:
        found.append(
            f"its own initial weights would be others ({name}: {apart:.2g} relative); all runs were"
            " started from the reference's."
        )
    step = floor.saturated_from()
    if step is not None:
        found.append(
            f"from step {step} on, rounding alone makes tensors differ by as much as they are large:"
            " nothing more can be told there."
        )
    return found


def _require_capabilities(plan: Plan, host: PluginHost) -> None:
    missing = host.backend(plan.backend).can(plan.placement).missing(NEEDED)
    if missing:
        raise PlanError(f"parity needs what {plan.backend!r} lacks: it has {', '.join(missing)}.")


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-@." else "-" for c in label).strip("-")


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"the output folder cannot be made: {error}.") from error
    return folder


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise IsotrainError(f"{file} cannot be written: {error}.") from error
