"""Rules about global and local batches, the number of samples and the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from isotrain.analysis.check.subject import CheckTarget, Hit, Subject, labels
from isotrain.core.contracts.backend.group_hooks import Trait
from isotrain.core.data import sampler
from isotrain.core.data.refusals import TRANSFORM
from isotrain.core.planning.single_sample_slices import (
    batches_with_single_sample,
    describe_single_samples,
)
from isotrain.core.quantities import counted
from isotrain.core.spec.orders import ByLengthOrder
from isotrain.core.spec.training_spec import TrainingSpec

_MUCH = 8.0
"""Scaling factor from which a warm-up is advised: 256 to 2048 samples in Goyal et al. (2017)."""


def local_batch_size(subject: Subject) -> Iterator[Hit]:
    """A global batch that grows with the number of replicas."""
    if subject.spec.local_batch_size is None:
        return
    for target in subject.several:
        replicas = counted(target.replicas, "replica")
        detail = f"{subject.spec.local_batch_size} x {replicas} = {_global(target)}"
        yield Hit("ISO201", "local_batch_size", detail, (target.label,))


def rate(subject: Subject) -> Iterator[Hit]:
    """A learning rate that does not match the global batch, or is scaled up without warm-up."""
    scaling, spec = subject.spec.scaling, subject.spec
    base = scaling.base_batch_size or spec.local_batch_size
    for target in subject.targets:
        batch = _global(target)
        if base is None or batch == base:
            continue
        detail = f"global batch {batch}, base batch {base}"
        if scaling.rule == "none":
            yield Hit("ISO202", "scaling", detail, (target.label,))
            continue
        factor = scaling.factor(batch)
        if factor >= _MUCH and not spec.schedule.has_warmup:
            yield Hit(
                "ISO203", "schedule", f"the rate is multiplied by {factor:g}", (target.label,)
            )
        if scaling.rule == "linear" and spec.optimizer.is_adaptive:
            yield Hit("ISO204", "scaling.rule", spec.optimizer.name, (target.label,))


def shares(subject: Subject) -> Iterator[Hit]:
    """Local batches and micro-batches of a full global batch that are unequal or empty."""
    micro_batches = subject.spec.gradient_accumulation_steps
    samples = dict(subject.with_samples())
    for target in subject.targets:
        batch = min(_global(target), samples.get(target, _global(target)))
        where = (target.label,)
        if batch < target.replicas:
            detail = f"{counted(batch, 'sample')} for {counted(target.replicas, 'replica')}"
            yield Hit("ISO206", "replicas", detail, where)
            continue
        if batch % target.replicas:
            detail = f"{counted(batch, 'sample')} over {counted(target.replicas, 'replica')}"
            yield Hit("ISO205", _batch_field(subject), detail, where)
        sizes = {_share(batch, target, replica) for replica in range(target.replicas)}
        listed = " and ".join(map(str, sorted(sizes)))
        words = f"local batches of {listed} in {counted(micro_batches, 'micro-batch')}"
        if min(sizes) < micro_batches:
            yield Hit("ISO208", "gradient_accumulation_steps", words, where)
        elif any(size % micro_batches for size in sizes):
            yield Hit("ISO207", "gradient_accumulation_steps", words, where)


def _share(batch: int, target: CheckTarget, replica: int) -> int:
    start, stop = sampler.slice_bounds(batch, target.replicas, replica)
    return stop - start


def length(subject: Subject) -> Iterator[Hit]:
    """Data sets that do not divide into whole global batches or epochs."""
    spec = subject.spec
    if isinstance(spec.order, ByLengthOrder) and spec.order.tokens is not None:
        return  # sizes follow the lengths
    for target, samples in subject.with_samples():
        batch, where = _global(target), (target.label,)
        rest = samples % batch
        detail = f"{counted(samples, 'sample')}, global batch {batch}"
        if samples < batch:
            code = "ISO213" if spec.drop_remainder else "ISO212"
            yield Hit(code, _batch_field(subject), detail, where)
            continue
        if spec.drop_remainder and rest and not spec.shuffle:
            yield Hit("ISO215", "drop_remainder", f"the last {rest} of {samples}", where)
        if not spec.drop_remainder and 0 < rest < target.replicas:
            words = f"{counted(rest, 'sample')} for {counted(target.replicas, 'replica')}"
            yield Hit("ISO209", _batch_field(subject), words, where)
        epoch = spec.epoch_steps or sampler.steps_per_epoch(samples, batch, spec.drop_remainder)
        if spec.steps is not None and spec.steps % epoch:
            yield Hit(
                "ISO211", "steps", f"{counted(spec.steps, 'step')}, {epoch} in an epoch", where
            )


def never(subject: Subject) -> Iterator[Hit]:
    """Averages and updates that begin after the last step."""
    spec, samples = subject.spec, dict(subject.with_samples())
    for target in subject.targets:
        epoch = _steps_per_epoch(spec, _global(target), samples.get(target))
        steps = spec.steps or (spec.epochs or 0) * epoch
        if not steps:
            continue
        words = f"the run has {counted(steps, 'step')}"
        average = spec.weight_average
        if average is not None and average.start >= steps:
            name = "ema" if spec.swa is None else "swa"
            yield Hit("ISO219", f"{name}.start", f"{average.start}: {words}", (target.label,))
        for name, update in (spec.updates or {}).items():
            begin = update.from_epoch * epoch
            first = begin + (update.every - 1 - begin) % update.every
            if first >= steps:
                yield Hit("ISO219", f"updates.{name}", words, (target.label,))


def _steps_per_epoch(spec: TrainingSpec, batch: int, samples: int | None) -> int:
    """Steps of an epoch; 0 where it is not known."""
    by_tokens = isinstance(spec.order, ByLengthOrder) and spec.order.tokens is not None
    if spec.epoch_steps is not None or samples is None or by_tokens:
        return spec.epoch_steps or 0
    return samples // batch if spec.drop_remainder else -(-samples // batch)


def single_samples(subject: Subject) -> Iterator[Hit]:
    """Local batches of one sample, in a model with a layer that normalises over the local batch."""
    for target in subject.targets:
        probe = subject.probes.get(target.plan.framework)
        if probe is None:
            continue
        sizes = batches_with_single_sample(subject.spec, target.plan, probe.samples)
        layers = probe.layers(Trait.LOCAL_STATISTICS)
        if sizes and probe.refuses_single_sample:
            words = f"{probe.refuses_single_sample}: {describe_single_samples(target.plan, sizes)}"
            yield Hit("ISO216", _batch_field(subject), words, (target.label,))
        elif sizes and layers:
            words = describe_single_samples(target.plan, sizes)
            yield Hit("ISO217", _batch_field(subject), words, (target.label,), layers)


def data(subject: Subject) -> Iterator[Hit]:
    """Data that shards itself, is not shuffled, or has a transform that mixes samples."""
    streamed = [
        target
        for target in subject.several
        if (probe := subject.probes.get(target.plan.framework)) and probe.samples is None
    ]
    if streamed:
        yield Hit("ISO210", "data", "it shards itself", labels(streamed))
    for framework, probe in subject.probes.items():
        where = [target for target in subject.several if target.plan.framework == framework]
        if where and TRANSFORM in probe.refused:
            yield Hit(TRANSFORM, "transform", probe.refused[TRANSFORM], labels(where))
    if not subject.spec.shuffle:
        yield Hit("ISO214", "shuffle", "false", labels(subject.targets))


def _global(target: CheckTarget) -> int:
    return target.plan.global_batch_size


def _batch_field(subject: Subject) -> str:
    return "local_batch_size" if subject.spec.global_batch_size is None else "global_batch_size"
