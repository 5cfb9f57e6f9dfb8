"""The check: plans every target, looks at data and model once per framework, asks every rule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from isotrain.analysis.check import batch_rules, machine_rules, model_rules
from isotrain.analysis.check.codes import CODES
from isotrain.analysis.check.findings import CheckResult, merge_hits, split_silenced
from isotrain.analysis.check.subject import CheckTarget, Hit, ModelProbe, Subject
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError, SpecError, unknown_name
from isotrain.core.launching.probe_run import probe_run
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
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
    model_rules.strategy,
    batch_rules.local_batch_size,
    batch_rules.rate,
    batch_rules.shares,
    batch_rules.length,
    batch_rules.single_samples,
    batch_rules.data,
    machine_rules.devices,
    machine_rules.memory,
    machine_rules.notes,
)


def check(
    spec: SpecLike,
    *,
    backends: str | Sequence[str],
    replicas: int | Sequence[int] | None = None,
    strategy: StrategyLike | None = None,
    ignore: Sequence[str] = (),
    measure: bool = True,
) -> CheckResult:
    """Says what will make results differ between backends or replica counts, before anything starts.

    Args:
        spec: A `TrainingSpec`, a mapping of its fields, or a YAML, TOML or JSON file.
        backends: `NAME` or `NAME:COLLECTIVE`, one or several.
        replicas: How many, one number or several; left out: one per usable GPU, or one.
        strategy: A name, or `{"name": ..., "options": {...}}`; left out: the spec's.
        ignore: Codes or groups of codes to leave out, besides those of the spec's `ignore`.
        measure: Whether to load the data and build the model, once per framework and in a process of
            its own, for the rules that need them.

    Returns:
        The findings, the most severe first, each with the targets it holds for.

    Raises:
        SpecError: The spec is wrong.
        PlanError: A code in `ignore` is unknown, or a number of replicas is below 1.
        IsotrainError: There is no such backend or collective.
    """
    given = load_spec(spec)
    if strategy is not None:
        given = given.with_strategy(strategy)
    cast = ResolvedSpec(given, plugin_manager(given.plugins))
    names = [backends] if isinstance(backends, str) else list(backends)
    counts = [replicas] if replicas is None or isinstance(replicas, int) else list(replicas)
    _require_known(names, counts)
    silenced_codes = (*_known_codes(given.ignore, SpecError), *_known_codes(ignore, PlanError))
    planned = machine_rules.plan_targets(cast, names, counts)
    hits = [each for each in planned if isinstance(each, Hit)]
    targets = [each for each in planned if isinstance(each, CheckTarget)]
    if targets:
        hits += _hits(cast, targets, measure)
    asked = [each.label if isinstance(each, CheckTarget) else each.targets[0] for each in planned]
    kept, silenced = split_silenced(merge_hits(hits, asked), silenced_codes)
    return CheckResult(given.name, tuple(asked), measure, kept, silenced)


def _known_codes(codes: Sequence[str], error: type[IsotrainError]) -> Sequence[str]:
    """The codes, or an error that says which of them is none."""
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
        for framework, own in _by_framework(targets).items():
            found = _seen(cast, own)
            if isinstance(found, Hit):
                yield found
            else:
                probes[framework] = found
    subject = Subject(
        cast.spec_with_model, tuple(targets), cast.strategy, probes, _sparing(cast.plugins)
    )
    for rule in _RULES:
        yield from rule(subject)


def _sparing(host: PluginManager) -> dict[str, Strategy]:
    """Every strategy that says that it takes less memory, with the options with which it does."""
    found = {}
    for name in host.strategies.names():
        with contextlib.suppress(Exception):  # it may be anyone's, and is only to be advised
            for options in host.strategies.get(name).memory_saving:
                given = ",".join([name, *(f"{key}={value}" for key, value in options.items())])
                found[given] = host.strategy(name, dict(options))
    return found


def _by_framework(targets: Iterable[CheckTarget]) -> dict[str, list[CheckTarget]]:
    groups: dict[str, list[CheckTarget]] = {}
    for target in targets:
        groups.setdefault(target.plan.framework, []).append(target)
    return groups


def _seen(cast: ResolvedSpec, targets: Sequence[CheckTarget]) -> ModelProbe | Hit:
    """Loads data and builds the model as a run would, but for rules that would end it there."""
    if cast.spec.drop_remainder:
        cast = ResolvedSpec(cast.spec.replace(drop_remainder=False), cast.plugins)
    try:
        found = probe_run(probe_step, cast, targets[0].plan.backend)
    except RunFailedError as error:
        labels = tuple(target.label for target in targets)
        return Hit("ISO502", "model", str(error), labels)
    return ModelProbe.from_dict(found)
