"""Slices of a single sample, which some layers cannot be trained on: known before the first step."""

from __future__ import annotations

from isotrain.core.contracts.plan import Plan
from isotrain.core.data import sampler
from isotrain.core.spec.training_spec import TrainingSpec


def batches_with_single_sample(spec: TrainingSpec, plan: Plan, samples: int | None) -> list[int]:
    """The sizes of the run's global batches that leave a replica with a slice of one sample.

    Args:
        spec: What is trained.
        plan: How.
        samples: In the training data; None where nobody knows: only full batches are looked at then.
    """
    full, rest = (1, 0) if samples is None else divmod(samples, plan.global_batch_size)
    ends_before = spec.steps is not None and spec.steps <= full
    sizes = [plan.global_batch_size] * bool(full)
    if rest and not spec.drop_remainder and not ends_before:
        sizes.append(rest)
    return [
        size
        for size in sizes
        if 1 in sampler.slice_sizes(size, plan.replicas, spec.gradient_accumulation_steps)
    ]


def describe_single_samples(plan: Plan, sizes: list[int]) -> str:
    """Of which batches it is that slices of one sample are made."""
    words = [
        "the last batch of each epoch" if size < plan.global_batch_size else "each full batch"
        for size in sizes
    ]
    parts = (
        f" in {plan.gradient_accumulation_steps} micro-batches each"
        if plan.gradient_accumulation_steps > 1
        else ""
    )
    found = (f"{word} has {size} samples" for word, size in zip(words, sizes, strict=True))
    return f"{' and '.join(found)} over {plan.replicas} replicas{parts}"


def single_sample_refusal(layer: str, plan: Plan, sizes: list[int]) -> str:
    """What to say of a layer that cannot be trained on such slices, and what to do."""
    drops = "" if plan.global_batch_size in sizes else "set drop_remainder: true, or "
    lower = (
        " or a lower gradient_accumulation_steps" if plan.gradient_accumulation_steps > 1 else ""
    )
    return (
        f"{layer} cannot be trained on a single sample, of which it has one value per channel to normalise;"
        f" and {describe_single_samples(plan, sizes)}, which leaves slices of one. What to do:"
        f" {drops}choose another"
        f" global_batch_size or number of replicas{lower}; or a layer that normalises each sample on its own."
    )
