"""Detects slices of a single sample, on which some layers (such as batch norm) cannot be trained."""

from __future__ import annotations

from isotrain.core.contracts.plan import Plan
from isotrain.core.data import sampler
from isotrain.core.quantities import counted
from isotrain.core.spec.training_spec import TrainingSpec


def batches_with_single_sample(spec: TrainingSpec, plan: Plan, samples: int | None) -> list[int]:
    """Sizes of the global batches of a run that give a replica a slice of one sample.

    Args:
        spec: Training spec.
        plan: Plan of the run.
        samples: Number of training samples; None if unknown: then only full batches are examined.
    """
    full, rest = (1, 0) if samples is None else divmod(samples, plan.global_batch_size)
    ends_before = spec.steps is not None and spec.steps <= full
    sizes = [plan.global_batch_size] * bool(full)
    if rest and not spec.drop_remainder and not ends_before:
        sizes.append(rest)
    if spec.batch_norm == "global":
        return [size for size in sizes if size == 1]
    cut = spec.dealt_parts or plan.replicas, spec.gradient_accumulation_steps
    return [size for size in sizes if 1 in sampler.slice_sizes(size, *cut)]


def describe_single_samples(plan: Plan, sizes: list[int]) -> str:
    """Describes the batches that give slices of one sample."""
    labels = [
        "the last batch of each epoch" if size < plan.global_batch_size else "each full batch"
        for size in sizes
    ]
    micro_batches = (
        f" in {plan.gradient_accumulation_steps} micro-batches each"
        if plan.gradient_accumulation_steps > 1
        else ""
    )
    batches = (
        f"{label} has {counted(size, 'sample')}" for label, size in zip(labels, sizes, strict=True)
    )
    return f"{' and '.join(batches)} over {counted(plan.replicas, 'replica')}{micro_batches}"


def single_sample_refusal(layer: str, plan: Plan, sizes: list[int]) -> str:
    """The message about a layer that cannot be trained on slices of one sample, with remedies."""
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
