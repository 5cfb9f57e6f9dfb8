"""Rules about the model's layers, the loss, metrics, optimizer and strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from isotrain.analysis.check.subject import CheckTarget, Hit, Subject, labels
from isotrain.core.contracts.backend.group_hooks import Trait
from isotrain.core.data.refusals import LOSS
from isotrain.core.errors import first_of
from isotrain.core.quantities import counted
from isotrain.core.spec import import_strings
from isotrain.core.spec.field_types import Component

_SUM = "sum"
_MAX_LISTED = 6


def layers(subject: Subject) -> Iterator[Hit]:
    """Layers that depend on the local batch, random numbers or their own dtype."""
    if subject.spec.parts is None:
        yield from _about_layers(subject, "ISO101", Trait.LOCAL_STATISTICS, subject.several)
    if subject.spec.random_layers == "per-replica":
        yield from _about_layers(subject, "ISO102", Trait.RANDOM, subject.several)
        if len(subject.frameworks) > 1:
            yield from _about_layers(subject, "ISO103", Trait.RANDOM, subject.targets)
    unsynchronised = [
        target
        for target in subject.several
        if target.plan.device not in target.adapter.sync_batchnorm_devices
    ]
    yield from _about_layers(subject, "ISO104", Trait.GLOBAL_STATISTICS, unsynchronised)
    yield from _about_layers(subject, "ISO105", Trait.LOWER_PRECISION, subject.targets)
    yield from _about_layers(subject, "ISO107", Trait.HIDDEN, subject.targets)
    if subject.spec.gradient_accumulation_steps > 1:
        yield from _about_layers(subject, "ISO108", Trait.LOCAL_STATISTICS, subject.targets)


def custom_training(subject: Subject) -> Iterator[Hit]:
    """Training methods of the model that isotrain does not call."""
    for layer_names, where in subject.with_layers(Trait.CUSTOM_TRAINING, subject.targets):
        yield Hit("ISO109", "model", f"not called: {', '.join(layer_names)}", labels(where))


def without_gradient(subject: Subject) -> Iterator[Hit]:
    """Trainable weights without a gradient of the loss."""
    for layer_names, where in subject.with_layers(Trait.WITHOUT_GRADIENT, subject.targets):
        yield Hit("ISO110", "model", f"no gradient: {', '.join(layer_names)}", labels(where))


def first_step(subject: Subject) -> Iterator[Hit]:
    """Errors of the first step in a probe process."""
    for framework, probe in subject.probes.items():
        where = [target for target in subject.targets if target.plan.framework == framework]
        if probe.fault:
            yield Hit("ISO504", "loss", probe.fault, labels(where))


def _about_layers(
    subject: Subject, code: str, trait: Trait, targets: Iterable[CheckTarget]
) -> Iterator[Hit]:
    for layer_names, where in subject.with_layers(trait, targets):
        count = counted(len(layer_names), "layer")
        yield Hit(code, "model", count, labels(where), layer_names)


def per_framework(subject: Subject) -> Iterator[Hit]:
    """Fields whose value differs between the frameworks of the targets."""
    spec, frameworks = subject.spec, subject.frameworks
    fields = {
        "model": spec.model,
        "loss": spec.loss,
        "objective": spec.objective,
        "gradients": spec.gradients,
        "optimizer.custom": getattr(spec.optimizer, "custom", None),
    }
    for name, value in fields.items():
        described = _described(value, frameworks)
        if len(set(described.values())) > 1:
            detail = ", ".join(f"{framework}: {text}" for framework, text in described.items())
            code = "ISO106" if name == "model" else "ISO303"
            yield Hit(code, name, detail, labels(subject.targets))


def _described(value: Any, frameworks: Iterable[str]) -> dict[str, str]:
    """The value of a per-framework mapping for each framework as text; empty for any other value."""
    if not isinstance(value, Mapping):
        return {}
    return {name: _words(value[name]) for name in frameworks if name in value}


def _words(value: Any) -> str:
    if isinstance(value, Component):
        return f"{value.label} {value.options}" if value.options else value.label
    return import_strings.describe(value)


def weight_decay(subject: Subject) -> Iterator[Hit]:
    """Coupled weight decay in native models of several frameworks."""
    optimizer = subject.spec.optimizer
    native = isinstance(subject.spec.model, Mapping) and len(subject.frameworks) > 1
    if optimizer.decays_weights and native and not optimizer.decay_is_decoupled:
        detail = f"{optimizer.weight_decay:g} with {optimizer.name}"
        yield Hit("ISO304", "optimizer.weight_decay", detail, labels(subject.targets))


def loss(subject: Subject) -> Iterator[Hit]:
    """A loss that is not a mean over samples, as measured or as declared."""
    spec = subject.spec
    shared = subject.targets if spec.gradient_accumulation_steps > 1 else subject.several
    by_detail: dict[str, list[CheckTarget]] = {}
    for target in shared:
        detail = _no_mean(subject, target.plan.framework)
        if detail is not None:
            by_detail.setdefault(detail, []).append(target)
    field = "loss" if spec.objective is None else "objective"
    for detail, targets in by_detail.items():
        yield Hit("ISO301", field, detail, labels(targets))


def _no_mean(subject: Subject, framework: str) -> str | None:
    probe, losses = subject.probes.get(framework), subject.spec.losses(framework).values()
    if probe is not None and LOSS in probe.refused:
        return probe.refused[LOSS]
    is_summed = any(loss.options.get("reduction") == _SUM for loss in losses)
    return "reduction: sum" if is_summed else None


def metrics(subject: Subject) -> Iterator[Hit]:
    """Custom metrics, which the spec names by reference."""
    if not subject.several:
        return
    for index, metric in enumerate(subject.spec.metrics):
        if metric.is_reference:
            yield Hit("ISO302", f"metrics.{index}", metric.label, labels(subject.several))


def shared_weights(subject: Subject) -> Iterator[Hit]:
    """Weights that several named updates change."""
    for framework, probe in subject.probes.items():
        where = [target for target in subject.targets if target.plan.framework == framework]
        if probe.shared_weights:
            detail = first_of(probe.shared_weights, _MAX_LISTED)
            yield Hit("ISO306", "updates", detail, labels(where))


def teachers(subject: Subject) -> Iterator[Hit]:
    """Trainable weights of a model that is called a teacher."""
    for framework, probe in subject.probes.items():
        where = [target for target in subject.targets if target.plan.framework == framework]
        if probe.teacher_weights:
            detail = first_of(probe.teacher_weights, _MAX_LISTED)
            yield Hit("ISO307", "model", detail, labels(where))


def strategy(subject: Subject) -> Iterator[Hit]:
    """A strategy that is not equivalent to data parallelism."""
    if subject.several and not subject.strategy.equals_data_parallel:
        yield Hit("ISO305", "strategy", subject.spec.strategy.name, labels(subject.several))
