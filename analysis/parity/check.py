"""Runs everything that a check of parity needs, one after the other, and puts the records together."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.analysis.parity.divergence import judge, step_records
from isotrain.analysis.parity.noise_floor import NoiseFloor, NoiseRun, scale_between
from isotrain.analysis.parity.records import PARITY_FILE, STAGES, NoiseRecord, RunRecord
from isotrain.analysis.parity.result import Parity
from isotrain.analysis.parity.run_trace import RunTrace, furthest_start, not_compared
from isotrain.analysis.parity.targets import ParityTarget, parity_targets
from isotrain.analysis.parity.trace_runner import Say, TraceRunner
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.contracts.plan import split_backend
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.planning.cluster_environment import require_single_process
from isotrain.core.planning.launcher_support import require_startable
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.sections import StrategyLike
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.weight_name_map import MapLike, read_maps
from isotrain.core.system import hardware
from isotrain.core.system.version import versions

DEFAULT_STEPS = 10
SAME_START = 1e-6
"""Initial weights that are further apart are told of."""


def parity(
    spec: SpecLike,
    *,
    backends: Sequence[str],
    replicas: Sequence[int] | None = None,
    strategies: Sequence[StrategyLike] | None = None,
    steps: int = DEFAULT_STEPS,
    map: MapLike | None = None,
    output: str | os.PathLike[str] | None = None,
    say: Say | None = None,
    launcher: str = LOCAL,
    launcher_options: Mapping[str, Any] | None = None,
) -> Parity:
    """Finds the first step and the first tensor at which runs of one spec part, and says why.

    Args:
        spec: A `TrainingSpec`, a mapping of its fields, or a YAML, TOML or JSON file.
        backends: Each `NAME` or `NAME:COLLECTIVE`; the first with the first number of replicas is the
            reference.
        replicas: Each backend runs with each of these numbers; left out: with 1, or with as many as the
            hosts of the launcher give.
        strategies: And under each of these, a name or `{"name": ..., "options": {...}}`; the first is the
            reference's. Left out: under the spec's.
        steps: How many steps to trace. The last of them is the first smaller global batch of the run
            where that comes later.
        map: For native models: which tensor is which, a mapping or a YAML or JSON file; see
            `docs/parity.md`.
        output: A folder to write `parity.json` and the fingerprints of each run to.
        say: Called with a line before each run.
        launcher: As for `isotrain.run`: every run goes by it.
        launcher_options: As for `isotrain.run`.

    Returns:
        The verdict, and records of every run.

    Raises:
        SpecError: The spec or the map is wrong.
        PlanError: Spec, backends and replicas do not fit together.
        UnsupportedError: A scheduler or launcher has started this process as one of several ranks.
        RunFailedError: The reference failed. Other runs that fail are told in their records.
    """
    require_single_process("parity")
    if steps < 1:
        raise PlanError(f"parity: steps: expected at least 1, received {steps}.")
    given = load_spec(spec)
    host = plugin_manager(given.plugins)
    chosen = LauncherChoice(launcher, launcher_options or {})
    require_startable(host.launcher(chosen.name, chosen.options))
    wanted = parity_targets(
        given,
        host,
        backends=backends,
        replicas=replicas,
        strategies=strategies or [given.strategy.name],
        launcher=chosen,
    )
    tracer = TraceRunner(host, wanted[0], steps, read_maps(map), output, say)
    for each in wanted:
        tracer.plan(each, each.spec)
    with tracer.running():
        found = _Check(given, host, wanted, tracer).made()
    tracer.keep(PARITY_FILE, found.to_json())
    return found


class _Check:
    """One check of parity: which runs it takes, and what follows from them."""

    def __init__(
        self,
        spec: TrainingSpec,
        host: PluginManager,
        wanted: Sequence[ParityTarget],
        tracer: TraceRunner,
    ) -> None:
        self._spec = spec
        self._host = host
        self._wanted = wanted
        self._trace = tracer.trace
        self._created = time.time()
        self._noise_records: list[NoiseRecord] = []

    def made(self) -> Parity:
        """Makes every run, and judges."""
        first, *others = self._wanted
        self._reference = self._trace(first, first.spec, "the reference")
        self._other = self._noise(first, "other precision", _other_precision(first.spec))
        threads = self._noise(first, "other threads", self._other_threads(first.spec))
        floor = NoiseFloor(self._reference, _noises(self._reference, self._other, threads))
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

    def _noise(self, wanted: ParityTarget, source: str, spec: TrainingSpec) -> RunTrace | None:
        """Runs the reference otherwise; a failure is noted, and the floor rests on what is left."""
        threads = f"{spec.threads} thread{'s' if spec.threads != 1 else ''}"
        about = spec.precision if source == "other precision" else threads
        try:
            found = self._trace(wanted, spec, f"the reference with {about}")
        except IsotrainError as error:
            self._noise_records.append(NoiseRecord(source, about, failed=str(error)))
            return None
        only = NoiseFloor(self._reference, _noises(self._reference, found))
        largest: dict[str, float] = {stage: only.largest(stage) for stage in STAGES}
        self._noise_records.append(NoiseRecord(source, about, largest))
        return found

    def _reference_record(self, wanted: ParityTarget, floor: NoiseFloor) -> RunRecord:
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

    def _judged(self, wanted: ParityTarget, floor: NoiseFloor) -> RunRecord:
        common = {
            name: getattr(wanted, name) for name in ("name", "backend", "replicas", "strategy")
        }
        try:
            run = self._trace(wanted, wanted.spec, "")
        except IsotrainError as error:
            return RunRecord(**common, status="failed", reason=str(error))
        notes: list[str] = []
        again = functools.partial(self._clearer, wanted, notes)
        found = judge(wanted.spec, run, self._reference, floor, self._other, again)
        return RunRecord(
            **common,
            status=found.status,
            reason=found.reason,
            first=found.first,
            divergences=found.divergences,
            causes=found.causes,
            confirmed=found.confirmed,
            steps=step_records(run, self._reference, floor),
            notes=[
                *notes,
                *self._about_strategy(wanted, run),
                *_notes(run, self._reference, floor),
            ],
            plan=run.plan,
        )

    def _clearer(
        self, wanted: ParityTarget, notes: list[str]
    ) -> tuple[RunTrace, RunTrace, NoiseFloor] | None:
        """The run and the reference in float64, to confirm a difference with; adds to notes why not."""
        if self._other is None:
            notes.append("the reference has no float64 run to confirm the difference with.")
            return None
        try:
            clearer = self._trace(wanted, _in_float64(wanted.spec), "in float64, to be sure")
        except IsotrainError as error:
            notes.append(f"it could not be confirmed in float64: {error}")
            return None
        noises = _noises(self._other, self._reference)
        return clearer, self._other, NoiseFloor(self._other, noises)

    def _about_strategy(self, wanted: ParityTarget, run: RunTrace) -> list[str]:
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
        return [*(f"{label} is {promise}." for label in own_way), *run.notes]


def _other_precision(spec: TrainingSpec) -> TrainingSpec:
    return spec.replace(precision="float32") if spec.precision == "float64" else _in_float64(spec)


def _in_float64(spec: TrainingSpec) -> TrainingSpec:
    changes = {} if spec.loss_scale is None else {"loss_scale": None}
    return spec.replace(precision="float64", **changes)


def _noises(reference: RunTrace, *runs: RunTrace | None) -> list[NoiseRun]:
    return [NoiseRun(run, scale_between(run, reference)) for run in runs if run is not None]


def _verdict(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The verdict over all runs, and its sentence."""
    reference, *others = runs
    divergences = [run.name for run in others if run.status == "difference"]
    failed = [run.name for run in others if run.status == "failed"]
    if divergences:
        summary = f"{_list(divergences)} {_does(divergences)} not train like {reference.name}."
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


def _notes(run: RunTrace, reference: RunTrace, floor: NoiseFloor) -> list[str]:
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
