"""A plan, completed with what only the data and the built model can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.state import ModelBytes
from isotrain.core.data import sampler
from isotrain.core.pipeline.pipeline_plan import PipelinePlan
from isotrain.core.pipeline.profile import LayerCost, ModelProfile
from isotrain.core.planning.single_sample_slices import (
    batches_with_single_sample,
    single_sample_refusal,
)
from isotrain.core.plugins.resolved_spec import ResolvedSpec


@dataclass(frozen=True)
class ModelStats:
    """What only the data and the built model can tell.

    Attributes:
        samples: In the training data; None for a stream.
        parameters: Trainable numbers in the model.
        gradient_bytes: Bytes of all gradients of one replica.
        weight_shapes: Of the trainable weights, in order.
        notes: On the model and the loss.
        model: What its state takes.
        layers: As they were timed; none where nobody asked.
        refuses_single_sample: A layer that cannot be trained on a slice of one sample, where one was tried.
    """

    samples: int | None
    parameters: int
    gradient_bytes: int
    weight_shapes: Sequence[Sequence[int]]
    notes: Sequence[str] = ()
    model: ModelBytes | None = None
    layers: Sequence[LayerCost] = ()
    refuses_single_sample: str | None = None


def complete_plan(plan: Plan, cast: ResolvedSpec, found: ModelStats) -> Plan:
    """Completes a plan with what was measured.

    Args:
        plan: Without it.
        cast: What the plan was made from; its strategy is told of the completed plan, so that it can start.
        found: What was measured.
    """
    spec, strategy = cast.spec_with_model, cast.strategy
    per_epoch = None
    total = spec.steps
    if found.samples is not None:
        per_epoch = sampler.steps_per_epoch(
            found.samples, plan.global_batch_size, spec.drop_remainder
        )
        total = spec.steps or (spec.epochs or 0) * per_epoch
    plan = replace(
        plan,
        samples=found.samples,
        steps_per_epoch=per_epoch,
        total_steps=total,
        parameters=found.parameters,
        gradient_bytes=found.gradient_bytes,
        weight_shapes=tuple(map(tuple, found.weight_shapes)),
        notes=(*plan.notes, *found.notes),
    )
    sizes = batches_with_single_sample(spec, plan, found.samples)
    if found.refuses_single_sample and sizes:
        plan = replace(
            plan,
            notes=(*plan.notes, single_sample_refusal(found.refuses_single_sample, plan, sizes)),
        )
    strategy.configure(spec, plan)
    kept = None if found.model is None else strategy.state_bytes(found.model, plan.replicas)
    stages = None
    if found.layers and found.model is not None:
        stages = strategy.pipeline_plan(ModelProfile(found.layers), found.model.slots, plan)
    exchanged = _exchanged(plan, cast, stages)
    return replace(plan, exchanged_bytes_per_step=exchanged, state_bytes=kept, stages=stages)


def _exchanged(plan: Plan, cast: ResolvedSpec, stages: PipelinePlan | None) -> float | None:
    """What each process sends in a step; of stages it is known once their layers were timed."""
    sent = 0.0
    if plan.replicas > 1:
        told = cast.strategy.exchanged_bytes(plan.gradient_bytes or 0, plan.replicas)
        backend = cast.host.backend(plan.backend)
        sent = backend.exchanged_bytes(plan, cast.spec_with_model) if told is None else told
    if STAGE not in plan.device_mesh.sizes:
        return sent
    return (
        None if stages is None else sent + plan.gradient_accumulation_steps * stages.crossing_bytes
    )
