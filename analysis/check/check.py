"""`isotrain.check`: plans every target, probes data and model once per framework, applies all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from isotrain.analysis.check import batch_rules, machine_rules, model_rules
from isotrain.analysis.check.codes import CODES
from isotrain.analysis.check.findings import CheckResult, merge_hits, split_silenced
from isotrain.analysis.check.subject import CheckTarget, Hit, ModelProbe, Subject
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError, SpecError, unknown_name
from isotrain.core.launching.probe_run import probe_run
from isotrain.core.planning.backend_choice import resolve_backend
from isotrain.core.planning.listings import memory_saving_strategies
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.reporting.status import waiting
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.sections import StrategyLike
from isotrain.core.worker.entry_points import probe_step

_RULES: tuple[Callable[[Subject], Iterator[Hit]], ...] = (
    model_rules.layers,
    model_rules.custom_training,
    model_rules.without_gradient,
    model_rules.first_step,
    model_rules.per_framework,
    model_rules.weight_decay,
    model_rules.loss,
    model_rules.metrics,
    model_rules.shared_weights,
    model_rules.teachers,
    model_rules.strategy,
    batch_rules.local_batch_size,
    batch_rules.rate,
    batch_rules.shares,
    batch_rules.length,
    batch_rules.never,
    batch_rules.single_samples,
    batch_rules.data,
    machine_rules.devices,
    machine_rules.memory,
    machine_rules.notes,
)


def check(
    spec: SpecLike,
    *,
    backends: str | Sequence[str] | None = None,
    replicas: int | Sequence[int] | None = None,
    strategy: StrategyLike | None = None,
    ignore: Sequence[str] = (),
    measure: bool = True,
    quiet: bool = False,
) -> CheckResult:
    """Says what will make results differ between backends or replica counts, before anything starts.

    Args:
        spec: A `TrainingSpec`, a mapping of its fields, or a YAML, TOML or JSON file.
        backends: Backends to check, one or several, each `NAME` or `NAME:COLLECTIVE`; left out: the one of a
            run that names none.
        replicas: Numbers of replicas, one or several; left out: one per available GPU, or one.
        strategy: Strategy name, or `{"name": ..., "options": {...}}`; left out: the spec's strategy.
        ignore: Codes or groups of codes to silence, besides those of the spec's `ignore`.
        measure: Whether to load the data and build the model, once per framework in a process of its
            own, for the rules that need them.
        quiet: Whether to show nothing meanwhile, also in a terminal or notebook.

    Returns:
        The findings, most severe first, each with the targets it applies to.

    Raises:
        SpecError: The spec is wrong.
        PlanError: A code in `ignore` is unknown, or a number of replicas is below 1.
        IsotrainError: A backend or collective is unknown.
    """
    loaded = load_spec(spec)
    if strategy is not None:
        loaded = loaded.with_strategy(strategy)
    resolved = ResolvedSpec(loaded, plugin_manager(loaded.plugins))
    requested = [backends] if backends is None or isinstance(backends, str) else backends
    names = [resolve_backend(each, resolved) for each in requested]
    counts = [replicas] if replicas is None or isinstance(replicas, int) else list(replicas)
    _require_known(names, counts)
    silenced_codes = (*_known_codes(loaded.ignore, SpecError), *_known_codes(ignore, PlanError))
    planned = machine_rules.plan_targets(resolved, names, counts)
    hits = [each for each in planned if isinstance(each, Hit)]
    targets = [each for each in planned if isinstance(each, CheckTarget)]
    if targets:
        with waiting("loading the data and building the model", quiet=quiet or not measure):
            hits += _hits(resolved, targets, measure)
    labels = [each.label if isinstance(each, CheckTarget) else each.targets[0] for each in planned]
    kept, silenced = split_silenced(merge_hits(hits, labels), silenced_codes)
    return CheckResult(loaded.name, tuple(labels), measure, kept, silenced)


def _known_codes(codes: Sequence[str], error: type[IsotrainError]) -> Sequence[str]:
    """The codes, unchanged; raises `error` with a suggestion for an unknown one."""
    for code in codes:
        if code not in CODES:
            raise error(f"ignore: {unknown_name('code', code, CODES)} docs/check.md explains them.")
    return codes


def _require_known(backends: Sequence[str], replicas: Sequence[int | None]) -> None:
    if not backends or not replicas:
        raise PlanError("check: name at least one backend, and one number of replicas or none.")
    for count in replicas:
        if count is not None and count < 1:
            raise PlanError(f"replicas: expected at least 1, received {count}.")


def _hits(cast: ResolvedSpec, targets: Sequence[CheckTarget], measure: bool) -> Iterator[Hit]:
    probes: dict[str, ModelProbe] = {}
    if measure:
        for framework, members in _by_framework(targets).items():
            probe = _seen(cast, members)
            if isinstance(probe, Hit):
                yield probe
            else:
                probes[framework] = probe
    subject = Subject(
        cast.spec_with_model,
        tuple(targets),
        cast.strategy,
        probes,
        {choice.label: each for choice, each in memory_saving_strategies(cast.plugins)},
    )
    for rule in _RULES:
        yield from rule(subject)


def _by_framework(targets: Iterable[CheckTarget]) -> dict[str, list[CheckTarget]]:
    groups: dict[str, list[CheckTarget]] = {}
    for target in targets:
        groups.setdefault(target.plan.framework, []).append(target)
    return groups


def _seen(cast: ResolvedSpec, targets: Sequence[CheckTarget]) -> ModelProbe | Hit:
    """Loads data and builds the model in a probe process; a failure becomes a hit.

    Partial batches are kept whatever the spec says, so that too few samples do not end the probe.
    """
    if cast.spec.drop_remainder:
        cast = ResolvedSpec(cast.spec.replace(drop_remainder=False), cast.plugins)
    try:
        fields = probe_run(probe_step, cast, targets[0].plan.backend)
    except RunFailedError as error:
        labels = tuple(target.label for target in targets)
        return Hit("ISO502", "model", str(error), labels)
    return ModelProbe.from_dict(fields)
