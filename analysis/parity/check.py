"""`isotrain.parity`: makes the traced runs of a parity check one at a time and compares them."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.analysis.pages.page import has_packages
from isotrain.analysis.parity.bit_trace import ORDER
from isotrain.analysis.parity.divergence import judge, step_records
from isotrain.analysis.parity.noise_floor import NoiseFloor, NoiseRun, scale_between
from isotrain.analysis.parity.records import (
    PARITY_FILE,
    STAGES,
    Divergence,
    NoiseRecord,
    RunRecord,
)
from isotrain.analysis.parity.result import Parity
from isotrain.analysis.parity.run_trace import RunTrace, furthest_start, not_compared
from isotrain.analysis.parity.targets import ParityTarget, parity_targets, require_one_update
from isotrain.analysis.parity.trace_runner import NEEDED, TraceRunner
from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.contracts.plan import split_backend
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.planning.backend_choice import resolve_backend
from isotrain.core.planning.cluster_environment import require_single_process
from isotrain.core.planning.launcher_support import require_startable
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.quantities import counted
from isotrain.core.reporting.status import OnProgress, default_progress
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.sections import StrategyLike, strategy_list
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.weight_name_map import MapLike, read_maps
from isotrain.core.system import hardware
from isotrain.core.system.version import versions

DEFAULT_STEPS = 10
SAME_START = 1e-6
"""Relative difference of initial weights above which a note reports it."""


def parity(
    spec: SpecLike,
    *,
    backends: str | Sequence[str] | None = None,
    replicas: int | Sequence[int] | None = None,
    strategies: StrategyLike | Sequence[StrategyLike] | None = None,
    steps: int = DEFAULT_STEPS,
    map: MapLike | None = None,
    output: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    quiet: bool = False,
    launcher: str = LOCAL,
    launcher_options: Mapping[str, Any] | None = None,
    bits: bool = False,
) -> Parity:
    """Finds the first step and tensor at which runs of one spec diverge, and the likely cause.

    Args:
        spec: A `TrainingSpec`, a mapping of its fields, or a YAML, TOML or JSON file.
        backends: Backends to compare, one or several, each `NAME` or `NAME:COLLECTIVE`; the first one with
            the first number of replicas is the reference. Left out: the one of a run that names none.
        replicas: Numbers of replicas to run each backend with, one or several; left out: 1, or as many
            as the launcher's allocation has room for.
        strategies: Strategies to run each backend under, one or several, each a name or
            `{"name": ..., "options": {...}}`; the reference uses the first. Left out: the spec's strategy.
        steps: Number of steps to trace, from the first. If a smaller global batch first comes later, the
            last traced step is that one.
        map: Weight name map of native models, a mapping or a YAML or JSON file; see `docs/parity.md`.
        output: Folder for `parity.json`, `report.html` and the fingerprints of each run; left out: nothing
            is written.
        on_progress: Callback that receives one line of text before each run; left out: the lines are shown
            in a terminal or notebook.
        quiet: Whether to show nothing meanwhile, also in a terminal or notebook.
        launcher: Launcher that starts every run, as for `isotrain.run`.
        launcher_options: Options of the launcher, as for `isotrain.run`.
        bits: Whether losses, weights, optimizer state and non-trainable state have to be equal to the bit, as
            with `reproducible: bits`. Backends are of one framework, and strategies are `data-parallel`,
            `sharded`, or others whose replicas have all weights. Where replicas have weights of their own
            between exchanges, as with `local-sgd`, all runs have as many replicas.

    Returns:
        The verdict, and a record of every run.

    Raises:
        SpecError: The spec or the map is wrong.
        PlanError: Spec, backends and replicas do not fit together.
        UnsupportedError: A scheduler or launcher has started this process as one of several ranks.
        RunFailedError: The reference run failed. Failures of other runs are in their records.
    """
    require_single_process("parity")
    if steps < 1:
        raise PlanError(f"parity: steps: expected at least 1, received {steps}.")
    loaded = load_spec(spec)
    if not bits:
        require_one_update(loaded)
    host = plugin_manager(loaded.plugins)
    launcher_choice = LauncherChoice(launcher, launcher_options or {})
    require_startable(host.launcher(launcher_choice.name, launcher_choice.options))
    resolved = ResolvedSpec(loaded, host)
    requested = [backends] if backends is None or isinstance(backends, str) else backends
    targets = parity_targets(
        loaded,
        host,
        backends=[resolve_backend(each, resolved) for each in requested],
        replicas=[replicas] if isinstance(replicas, int) else replicas,
        strategies=strategy_list(strategies) or [loaded.strategy.name],
        launcher=launcher_choice,
    )
    if len(targets) < 2:
        raise PlanError(
            "parity: there is nothing to compare. Name two backends (--backend A --backend B), two"
            " numbers of replicas (--replicas 1,2) or two strategies (--strategy A --strategy B)."
        )
    if bits:
        _require_comparable_bits(targets, host, map)
    tracer = TraceRunner(
        host,
        targets[0],
        steps,
        read_maps(map),
        output,
        on_progress or default_progress(quiet),
        needed={Capability.NAMED_STATE} if bits else NEEDED,
    )
    for target in targets:
        tracer.plan(target, target.spec)
    check = (_BitCheck if bits else _Check)(loaded, host, targets, tracer)
    with tracer.running():
        result = check.run()
    tracer.keep(PARITY_FILE, result.to_json())
    if output is not None and has_packages():
        result.to_html(output)
    return result


class _Check:
    """A parity check in progress: makes the runs of its targets and judges each of them."""

    def __init__(
        self,
        spec: TrainingSpec,
        host: PluginManager,
        targets: Sequence[ParityTarget],
        tracer: TraceRunner,
    ) -> None:
        self._spec = spec
        self._host = host
        self._targets = targets
        self._tracer = tracer
        self._trace = tracer.trace
        self._created = time.time()
        self._noise_records: list[NoiseRecord] = []

    def run(self) -> Parity:
        """Makes all runs and returns their verdicts, causes and noise floor."""
        first, *others = self._targets
        self._reference = self._trace(first, first.spec, "the reference")
        self._other = self._noise(first, "other precision", _other_precision(first.spec))
        threads = self._noise(first, "other threads", self._other_threads(first.spec))
        floor = NoiseFloor(self._reference, _noises(self._reference, self._other, threads))
        runs = [self._reference_record(first, floor)]
        runs += [self._compared(target, floor) for target in others]
        return self._result(runs, [step.step for step in self._reference.steps])

    def _result(self, runs: list[RunRecord], steps: list[int]) -> Parity:
        return Parity(
            name=self._spec.name,
            **_verdict(runs),
            spec=self._spec.to_dict(),
            reference=runs[0].name,
            created=self._created,
            steps=steps,
            noise=self._noise_records,
            runs=runs,
            machine=hardware.describe(),
            versions=versions(self._packages()),
        )

    def _packages(self) -> list[str]:
        """The packages of every backend that takes part."""
        names = {split_backend(target.backend)[0]: None for target in self._targets}
        return [package for name in names for package in self._host.backend(name).packages]

    def _other_threads(self, spec: TrainingSpec) -> TrainingSpec:
        threads = self._reference.plan["threads"]
        return spec.replace(threads=1 if threads > 1 else 2)

    def _noise(self, target: ParityTarget, source: str, spec: TrainingSpec) -> RunTrace | None:
        """Runs the reference with another precision or thread count; None, and a record, if that fails."""
        threads = f"{spec.threads} thread{'s' if spec.threads != 1 else ''}"
        about = spec.precision if source == "other precision" else threads
        try:
            trace = self._trace(target, spec, f"the reference with {about}")
        except IsotrainError as error:
            self._noise_records.append(NoiseRecord(source, about, failed=str(error)))
            return None
        floor = NoiseFloor(self._reference, _noises(self._reference, trace))
        largest: dict[str, float] = {stage: floor.largest(stage) for stage in STAGES}
        self._noise_records.append(NoiseRecord(source, about, largest))
        return trace

    def _reference_record(self, target: ParityTarget, floor: NoiseFloor) -> RunRecord:
        return RunRecord(
            **_described(target),
            status="reference",
            reason="all others are compared with it.",
            steps=step_records(self._reference, self._reference, floor),
            plan=self._reference.plan,
        )

    def _compared(self, target: ParityTarget, floor: NoiseFloor) -> RunRecord:
        common = _described(target)
        try:
            run = self._trace(target, target.spec, "")
        except IsotrainError as error:
            return RunRecord(**common, status="failed", reason=str(error))
        notes: list[str] = []
        rerun = functools.partial(self._rerun_in_float64, target, notes)
        verdict = judge(target.spec, run, self._reference, floor, self._other, rerun)
        return RunRecord(
            **common,
            status=verdict.status,
            reason=verdict.reason,
            first=verdict.first,
            divergences=verdict.divergences,
            causes=verdict.causes,
            confirmed=verdict.confirmed,
            steps=step_records(run, self._reference, floor),
            notes=[
                *notes,
                *self._strategy_notes(target, run),
                *_notes(run, self._reference, floor),
            ],
            plan=run.plan,
        )

    def _rerun_in_float64(
        self, target: ParityTarget, notes: list[str]
    ) -> tuple[RunTrace, RunTrace, NoiseFloor] | None:
        """Run, reference and noise floor in float64; None, and a note, if one of the runs is missing."""
        if self._other is None:
            notes.append("the reference has no float64 run to confirm the difference with.")
            return None
        try:
            run = self._trace(target, _in_float64(target.spec), "in float64, to be sure")
        except IsotrainError as error:
            notes.append(f"it could not be confirmed in float64: {error}")
            return None
        noises = _noises(self._other, self._reference)
        return run, self._other, NoiseFloor(self._other, noises)

    def _strategy_notes(self, target: ParityTarget, run: RunTrace) -> list[str]:
        """Notes on a strategy that differs from the reference's: non-equivalence, and how it takes steps."""
        choices = (target.spec.strategy, self._targets[0].spec.strategy)
        if choices[0] == choices[1]:
            return []
        not_equivalent = [
            choice.label
            for choice in choices
            if not self._host.strategy(choice.name, choice.options).equals_data_parallel
        ]
        caveat = (
            "not meant to train as data-parallel does: what differs there is no fault of a backend"
        )
        return [*(f"{label} is {caveat}." for label in not_equivalent), *run.notes]


class _BitCheck(_Check):
    """A parity check whose runs have to be equal to the bit."""

    def run(self) -> Parity:
        """Makes all runs and returns where their bits differ first."""
        first, *others = self._targets
        (main, *_) = self._tracer.trace_bits(first)
        reason = "all others are compared with it."
        reference = RunRecord(
            **_described(first), status="reference", reason=reason, plan=main["plan"]
        )
        return self._result([reference, *map(self._bits_compared, others)], main["steps"])

    def _bits_compared(self, target: ParityTarget) -> RunRecord:
        common = _described(target)
        try:
            ranks = self._tracer.trace_bits(target)
        except IsotrainError as error:
            return RunRecord(**common, status="failed", reason=str(error))
        plan, expected = ranks[0]["plan"], set(ranks[0]["expected"])
        names = {name for rank in ranks for name in rank["names"]}
        notes = [
            f"not compared, because {owner} has none: {', '.join(sorted(missing))}"
            for owner, missing in (
                ("the reference", names - expected),
                ("the run", expected - names),
            )
            if missing
        ]
        divergences = _first_differences(ranks, plan["precision"])
        if not divergences:
            reason = f"every bit is the same in {counted(len(ranks[0]['steps']), 'step')}."
            return RunRecord(**common, status="equal", reason=reason, notes=notes, plan=plan)
        if target.spec.reproducible is None:
            notes.append("the spec does not say `reproducible: bits`.")
        return RunRecord(
            **common,
            status="difference",
            reason="bits differ.",
            first=divergences[0],
            divergences=divergences,
            notes=notes,
            plan=plan,
        )


def _first_differences(ranks: Sequence[Mapping[str, Any]], precision: str) -> list[Divergence]:
    """Differing tensors of the first step and stage that differ on any rank, one for each name."""
    found = [
        Divergence(**each, floor=0.0, precision=precision)
        for rank in ranks
        for each in rank["differences"]
    ]
    if not found:
        return []
    step, position = min((each.step, ORDER.index(each.stage)) for each in found)
    by_name = {
        each.name: each for each in found if (each.step, each.stage) == (step, ORDER[position])
    }
    return list(by_name.values())


def _described(target: ParityTarget) -> dict[str, Any]:
    """Fields of a `RunRecord` that say what was run."""
    return {name: getattr(target, name) for name in ("name", "backend", "replicas", "strategy")}


def _require_comparable_bits(
    targets: Sequence[ParityTarget], host: PluginManager, names: MapLike | None
) -> None:
    """Refuses runs whose bits cannot be compared.

    Raises:
        PlanError: Backends are of several frameworks; there is a weight name map; processes have parts of the
            model that round otherwise; or numbers of replicas differ, and replicas have weights of their own.
    """
    if names is not None:
        raise PlanError(
            "parity --bits: weights are compared under their own names. Leave --map out."
        )
    frameworks = {host.backend(split_backend(each.backend)[0]).framework for each in targets}
    if len(frameworks) > 1:
        raise PlanError(
            f"parity --bits: expected backends of one framework, received {' and '.join(sorted(frameworks))}:"
            " their kernels round differently. Leave --bits out."
        )
    has_several_counts = len({each.replicas for each in targets}) > 1
    for each in targets:
        strategy = ResolvedSpec(each.spec, host).strategy
        layout = strategy.parallel_layout.for_replicas(each.replicas).name
        backend = host.backend(split_backend(each.backend)[0])
        capabilities = backend.capabilities_for(layout)
        missing = capabilities.missing({Capability.ORDERED_SUMS})
        if missing and Capability.GRADIENTS not in capabilities.has:
            raise PlanError(
                f"parity --bits: {each.name} has {'; '.join(missing)}. Choose another strategy, or leave"
                " --bits out."
            )
        if has_several_counts and strategy.keeps_replicas_equal != "always":
            raise PlanError(
                f"parity --bits: {each.strategy}: its replicas have weights of their own, and other"
                " numbers of replicas have no counterparts. Give one number of replicas."
            )


def _other_precision(spec: TrainingSpec) -> TrainingSpec:
    return spec.replace(precision="float32") if spec.precision == "float64" else _in_float64(spec)


def _in_float64(spec: TrainingSpec) -> TrainingSpec:
    changes = {} if spec.loss_scale is None else {"loss_scale": None}
    return spec.replace(precision="float64", **changes)


def _noises(reference: RunTrace, *runs: RunTrace | None) -> list[NoiseRun]:
    return [NoiseRun(run, scale_between(run, reference)) for run in runs if run is not None]


def _verdict(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The fields `verdict` and `summary` of a `ParityRecord`."""
    reference, *others = runs
    divergences = [run.name for run in others if run.status == "difference"]
    failed = [run.name for run in others if run.status == "failed"]
    if divergences:
        verb = "does" if len(divergences) == 1 else "do"
        summary = f"{_list(divergences)} {verb} not train like {reference.name}."
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


def _notes(run: RunTrace, reference: RunTrace, floor: NoiseFloor) -> list[str]:
    notes = [
        f"not compared, because the reference has no such {STAGES[stage]}: {', '.join(names)}"
        for stage, names in not_compared(run, reference).items()
    ]
    if not run.steps[0].tensors["reduced"]:
        notes.append("this backend does not show the gradients after the reduction.")
    name, start_difference = furthest_start(run, reference)
    if start_difference > SAME_START:
        notes.append(
            f"its own initial weights would differ ({name}: {start_difference:.2g} relative); all runs were"
            " started from the reference's."
        )
    step = floor.saturated_from()
    if step is not None:
        notes.append(
            f"from step {step} on, rounding alone makes tensors differ by as much as they are large:"
            " nothing more can be told there."
        )
    return notes
