"""Statistics of the data and the built model, and the plan completed by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from isotrain.core.contracts.backend import tree_sum
from isotrain.core.contracts.backend.group_hooks import PassCosts
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import LOCALHOST
from isotrain.core.contracts.state import ModelBytes
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.pipeline.pipeline_plan import PipelinePlan
from isotrain.core.pipeline.profile import LayerCost, ModelProfile
from isotrain.core.planning.memory_limit import MemoryLimit
from isotrain.core.planning.single_sample_slices import (
    batches_with_single_sample,
    single_sample_refusal,
)
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.schedules import RunLength


@dataclass(frozen=True)
class ModelStats:
    """Statistics of the training data and the built model.

    Attributes:
        samples: Number of training samples of an epoch; None for a stream that shards itself.
        parameters: Number of trainable parameters.
        gradient_bytes: Bytes of all gradients of one replica.
        weight_shapes: Shapes of the trainable weights, in order.
        notes: Notes on the model and the loss.
        model: Bytes of weights, gradients and optimizer state; None if unknown.
        layers: Measured cost of each layer, for pipeline runs; empty if not measured.
        loss_seconds: Measured seconds of the loss and the metrics of a micro-batch, for pipeline runs.
        refuses_single_sample: Name of a layer that cannot be trained on a slice of one sample; None if there
            is none, or none was tried.
        steps_per_epoch: Number of steps in an epoch; None if unknown.
        sample_costs: Costs of the passes per sample of a slice; None if unknown.
    """

    samples: int | None
    parameters: int
    gradient_bytes: int
    weight_shapes: Sequence[Sequence[int]]
    notes: Sequence[str] = ()
    model: ModelBytes | None = None
    layers: Sequence[LayerCost] = ()
    loss_seconds: float = 0.0
    refuses_single_sample: str | None = None
    steps_per_epoch: int | None = None
    sample_costs: PassCosts | None = None


def complete_plan(plan: Plan, resolved_spec: ResolvedSpec, stats: ModelStats) -> Plan:
    """Completes a plan with the statistics of data and model.

    Args:
        plan: Plan without them.
        resolved_spec: Spec of the plan; its strategy is configured with the completed plan.
        stats: Statistics of data and model.
    """
    spec, strategy = resolved_spec.spec_with_model, resolved_spec.strategy
    per_epoch = stats.steps_per_epoch
    total = spec.steps
    if per_epoch is not None:
        total = spec.steps or (spec.epochs or 0) * per_epoch
    first_rate, last_rate = None, None
    if per_epoch is not None and total is not None:
        run = RunLength(per_epoch, total)
        schedule = next(iter(spec.update_specs.values())).schedule
        first_rate, last_rate = (
            plan.learning_rate * schedule.fraction(step, run) for step in (0, total - 1)
        )
    plan = replace(
        plan,
        samples=stats.samples,
        first_learning_rate=first_rate,
        last_learning_rate=last_rate,
        steps_per_epoch=per_epoch,
        total_steps=total,
        parameters=stats.parameters,
        gradient_bytes=stats.gradient_bytes,
        activation_bytes=_activation_bytes(plan, stats, spec.parts),
        weight_shapes=tuple(map(tuple, stats.weight_shapes)),
        notes=(*plan.notes, *stats.notes),
    )
    sizes = batches_with_single_sample(spec, plan, stats.samples)
    if stats.refuses_single_sample and sizes:
        plan = replace(
            plan,
            notes=(*plan.notes, single_sample_refusal(stats.refuses_single_sample, plan, sizes)),
        )
    strategy.configure(spec, plan)
    state_bytes = None if stats.model is None else strategy.state_bytes(stats.model, plan.replicas)
    stages = None
    if stats.layers and stats.model is not None:
        profile = ModelProfile(stats.layers, stats.loss_seconds)
        stages = strategy.pipeline_plan(profile, stats.model.slots, plan)
    exchanged = _exchanged_bytes(plan, resolved_spec, stages)
    return replace(
        plan,
        exchanged_bytes_per_step=exchanged,
        state_bytes=state_bytes,
        stages=stages,
        warnings=(*plan.warnings, *_memory_warnings(plan, strategy, stats.model)),
    )


def _memory_warnings(plan: Plan, strategy: Strategy, model: ModelBytes | None) -> list[str]:
    """Warning of a run whose state this machine or its GPUs have no room for; none of runs elsewhere.

    Args:
        plan: Plan with its processes.
        strategy: Strategy of the plan.
        model: Size of the model's state; None if unknown.
    """
    if model is None or any(each.host != LOCALHOST for each in plan.processes):
        return []
    limit = MemoryLimit.of(plan, model)
    excess = None if limit is None else limit.excess(strategy)
    if excess is None:
        return []
    return [
        f"memory: {excess} (weights, gradients and optimizer state). `isotrain check` says which strategies"
        " would fit"
    ]


def _activation_bytes(plan: Plan, stats: ModelStats, parts: int | None) -> int | None:
    """Bytes of activations on the replica with the largest micro-batch; None if unknown.

    Args:
        plan: Plan with the sizes of the batches.
        stats: Statistics with the bytes per sample.
        parts: Micro-batches of a global batch, whatever the number of replicas; None for those of the plan.
    """
    if stats.sample_costs is None:
        return None
    if parts is None:
        samples, micro_batches = max(plan.local_batch_sizes), plan.gradient_accumulation_steps
    else:
        samples, micro_batches = plan.global_batch_size, parts
    micro_batch = math.ceil(samples / micro_batches)
    return round(micro_batch * stats.sample_costs.peak_bytes)


def _exchanged_bytes(
    plan: Plan, resolved_spec: ResolvedSpec, stages: PipelinePlan | None
) -> float | None:
    """Bytes that each process sends per step; None if activations are sent that are not measured."""
    sent = 0.0
    spec = resolved_spec.spec
    if spec.parts is not None:
        nbytes = plan.gradient_bytes or 0
        elements = sum(map(math.prod, plan.weight_shapes or ()))
        sent = tree_sum.exchanged_bytes(nbytes, elements, spec.parts, plan.replicas)
        sent += resolved_spec.strategy.update_bytes(nbytes, plan.replicas)
    elif plan.replicas > 1 or plan.device_mesh.stage_processes:
        strategy_bytes = resolved_spec.strategy.exchanged_bytes(
            plan.gradient_bytes or 0, plan.replicas
        )
        backend = resolved_spec.plugins.backend(plan.backend)
        sent = (
            backend.exchanged_bytes(plan, resolved_spec.spec_with_model)
            if strategy_bytes is None
            else strategy_bytes
        )
    if plan.device_mesh.positions_per_replica == 1:
        return sent
    return (
        None if stages is None else sent + plan.gradient_accumulation_steps * stages.crossing_bytes
    )
