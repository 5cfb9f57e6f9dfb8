"""Plan of a run on GPUs of hosts elsewhere: its collectives, its memory, and bounds on the time of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from isotrain.core.contracts.backend.adapter_protocols import (
    AbstractBackend,
    Message,
    RecordingBackend,
)
from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import PlanError, SpecError, unknown_name
from isotrain.core.planning.listings import memory_saving_strategies
from isotrain.core.planning.model_stats import ModelStats, complete_plan
from isotrain.core.planning.planner import make_plan
from isotrain.core.planning.resources import Resources
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.training_spec import TrainingSpec

_MAX_STEPS = 64
"""Number of steps from which collectives are not counted."""
RESERVED_BYTES = 2**30
"""Memory that CUDA, NCCL and work space of kernels are assumed to take."""
ACHIEVED = 0.4
"""Fraction of the published figures that the upper bound of a step assumes, as large trainings report."""


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU in a host of 8, per GPU and in one direction.

    Attributes:
        memory_bytes: Bytes of its memory.
        flops: Operations per second of dense matrix products, by precision: in 16 bits, float32, float64.
        memory_rate: Bytes per second from its memory.
        link_rate: Bytes per second to the other GPUs of a host.
        network_rate: Bytes per second to other hosts.
    """

    memory_bytes: float
    flops: Mapping[int, float]
    memory_rate: float
    link_rate: float
    network_rate: float


GPUS = {
    "a100": Gpu(80e9, {16: 312e12, 32: 19.5e12, 64: 19.5e12}, 2.039e12, 300e9, 25e9),
    "h100": Gpu(80e9, {16: 989.4e12, 32: 66.9e12, 64: 66.9e12}, 3.35e12, 450e9, 50e9),
    "h200": Gpu(141e9, {16: 989.4e12, 32: 66.9e12, 64: 66.9e12}, 4.8e12, 450e9, 50e9),
    "b200": Gpu(180e9, {16: 2250e12, 32: 80e12, 64: 40e12}, 8e12, 900e9, 50e9),
}
"""NVIDIA's data sheets of the SXM cards (without sparsity; float32 without TF32) and of the DGX of each."""


def gpu(name: str) -> Gpu:
    """The figures of a GPU.

    Raises:
        PlanError: They are not known.
    """
    if name not in GPUS:
        raise PlanError(f"--gpu: {unknown_name('GPU', name, GPUS)}")
    return GPUS[name]


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind that rank 0 takes part in, in groups of one size.

    Attributes:
        kind: Kind, as in `Message`.
        processes: Number of processes in the group, or of replicas that one process holds; 2 for transfers.
        hosts: Number of hosts that these are on.
        count: Number of them per step, on average.
        nbytes: Bytes of their unsharded tensors per step, on average.
        is_fused: Whether the backend may send several as one, so that `count` is the largest number.
    """

    kind: str
    processes: int
    hosts: int
    count: float
    nbytes: float
    is_fused: bool = False

    @property
    def sent_bytes(self) -> float:
        """Bytes that a process sends per step, by a ring; that of a broadcast's root."""
        if self.kind in ("send", "broadcast"):
            return self.nbytes
        return (1 + (self.kind == "all-reduce")) * (1 - 1 / self.processes) * self.nbytes

    def seconds(self, card: Gpu) -> float:
        """Time at the rates of a GPU's links, all GPUs of a host sharing its network."""
        rate = card.link_rate
        if self.hosts > 1:
            rate = min(rate, card.network_rate * max(1, self.processes // self.hosts))
        return self.sent_bytes / rate


def may_lack_values(resolved_spec: ResolvedSpec, plan: Plan) -> bool:
    """Whether the model of a plan can be measured without values, and so without memory, for its weights."""
    return isinstance(resolved_spec.plugins.backend(plan.backend), AbstractBackend)


def counting_obstacle(resolved_spec: ResolvedSpec, plan: Plan) -> str | None:
    """Reason why the collectives of a plan cannot be counted; None if they can."""
    adapter = resolved_spec.plugins.backend(plan.backend)
    if not isinstance(adapter, RecordingBackend):
        return f"backend {plan.backend!r} does not count them"
    steps = counted_steps(resolved_spec.spec, resolved_spec.strategy)
    if steps > _MAX_STEPS:
        return f"they repeat after {steps} steps, more than {_MAX_STEPS}"
    return None


def counted_steps(spec: TrainingSpec, strategy: Strategy) -> int:
    """Number of steps after which the collectives of a run repeat, once all of its updates have begun."""
    return math.lcm(strategy.period, *(each.every for each in (spec.updates or {}).values()))


def collectives(messages: Sequence[Message], steps: int, plan: Plan) -> list[Collective]:
    """Collectives per step, of messages in some steps of rank 0; those with most bytes first."""
    counts: Counter[tuple[str, int, int, bool]] = Counter()
    nbytes: Counter[tuple[str, int, int, bool]] = Counter()
    host_of = {
        each: process.host
        for process in plan.processes
        for each in (process.replicas if len(plan.processes) == 1 else [process.rank])
    }
    for message in messages:
        hosts = {host_of[rank] for rank in message.ranks}
        key = message.kind, len(message.ranks), len(hosts), message.is_fused
        counts[key] += 1
        nbytes[key] += message.nbytes
    found = [
        Collective(*key[:3], counts[key] / steps, size / steps, is_fused=key[3])
        for key, size in nbytes.items()
    ]
    return sorted(found, key=lambda each: -each.nbytes)


@dataclass(frozen=True)
class StepBounds:
    """Times of a step at the published figures of a GPU, in seconds.

    Attributes:
        compute: Operations of the passes.
        memory: Reads and writes of the passes and of the update.
        communication: Collectives.
    """

    compute: float
    memory: float
    communication: float

    @property
    def lowest(self) -> float:
        """Time if computing and communication overlap, both as fast as published."""
        return max(self.compute, self.memory, self.communication)

    @property
    def highest(self) -> float:
        """Time if they do not overlap, at `ACHIEVED` of the published figures."""
        return (max(self.compute, self.memory) + self.communication) / ACHIEVED


@dataclass(frozen=True)
class GpuPlan:
    """Plan of a run on GPUs that are not here.

    Attributes:
        plan: The plan.
        collectives: Collectives of a step; None if they are not counted.
        why_not_counted: Reason of that.
        needed_bytes: Bytes that the GPU with most of them needs in a step; without activations that are not
            counted.
        gpu: Name of the GPU; None: any.
        bounds: Bounds on the time of a step; None if unknown.
        alternatives: What fits, as options of the command line, if the plan does not.
    """

    plan: Plan
    collectives: Sequence[Collective] | None
    why_not_counted: str | None
    needed_bytes: int
    gpu: str | None = None
    bounds: StepBounds | None = None
    alternatives: Sequence[str] = ()

    @property
    def gathered_bytes(self) -> int | None:
        """Bytes on a GPU while it has all weights; None if it always has."""
        return gathered_bytes(self.plan)

    @property
    def activations_counted(self) -> bool:
        """Whether `needed_bytes` has the activations."""
        return self.plan.stages is not None or self.plan.activation_bytes is not None

    @property
    def fits(self) -> bool | None:
        """Whether the GPU has enough memory; None without a GPU, or if uncounted activations decide."""
        if self.gpu is None:
            return None
        if max(self.needed_bytes, self.gathered_bytes or 0) > gpu(self.gpu).memory_bytes:
            return False
        return True if self.activations_counted else None

    def to_dict(self) -> dict[str, Any]:
        """All but the plan as plain JSON values."""
        bounds = self.bounds
        times = {} if bounds is None else {"lowest": bounds.lowest, "highest": bounds.highest}
        return {
            "collectives": None
            if self.collectives is None
            else [{**asdict(each), "sent_bytes": each.sent_bytes} for each in self.collectives],
            "why_not_counted": self.why_not_counted,
            "needed_bytes": self.needed_bytes,
            "gathered_bytes": self.gathered_bytes,
            "activations_counted": self.activations_counted,
            "gpu": self.gpu,
            "fits": self.fits,
            "step_seconds": None if bounds is None else {**asdict(bounds), **times},
            "alternatives": list(self.alternatives),
        }


def needed_bytes(plan: Plan) -> int:
    """Bytes on the GPU that needs most: state, activations if they are counted, and what is reserved."""
    if plan.stages is not None:
        stages = plan.stages.stages
        trained = sum(stage.weight_bytes for stage in stages)
        earlier = max((each.weight_versions - 1) * each.weight_bytes for each in stages)
        weights = trained if plan.state_bytes is None else plan.state_bytes.weights - earlier
        # weights that are not trained may all lie in this stage
        return (
            RESERVED_BYTES
            + max(0, weights - trained)
            + max(
                (each.weight_versions + each.gradient_versions) * each.weight_bytes
                + each.slot_bytes
                + each.activation_bytes
                for each in stages
            )
        )
    state = 0 if plan.state_bytes is None else plan.state_bytes.total
    return state + (plan.activation_bytes or 0) + RESERVED_BYTES


def gathered_bytes(plan: Plan) -> int | None:
    """Bytes on a GPU while it has all weights, as in evaluations and at the end of the run.

    None for runs whose processes have all weights at any time.
    """
    is_split = plan.device_mesh.positions_per_replica > 1
    state = plan.state_bytes
    if state is None or not (is_split or plan.parallel_layout == "fully-sharded"):
        return None
    if plan.stages is not None:  # its weights are among all; its gradients stay
        own = max(each.weight_bytes + each.slot_bytes for each in plan.stages.stages)
        return RESERVED_BYTES + state.weights + own
    gradients = min(state.gradients, state.weights)  # they are sharded again after a step
    return RESERVED_BYTES + state.weights + gradients + state.slots + (plan.gradient_bytes or 0)


def _most_bytes(plan: Plan) -> int:
    """Bytes that a GPU must have for a run."""
    return max(needed_bytes(plan), gathered_bytes(plan) or 0)


def step_bounds(
    plan: Plan, stats: ModelStats, counted: Sequence[Collective] | None, card: Gpu
) -> StepBounds | None:
    """Bounds on the time of a step; None if the costs of the passes are unknown, or the exchange is by TCP.

    Args:
        plan: The plan.
        stats: Statistics of its model.
        counted: Its collectives; None: an all-reduce of the bytes that the plan says are sent.
        card: Figures of the GPU.
    """
    state = plan.state_bytes
    if stats.sample_costs is None or state is None or plan.uses_parameter_server:
        return None
    costs = stats.sample_costs * max(plan.local_batch_sizes)
    updated = state.gradients + 2 * (state.weights + state.slots)
    if counted is None:
        sent = plan.exchanged_bytes_per_step or 0.0
        counted = [Collective("send", plan.replicas, len(plan.hosts), 1, sent)]
    bits = {"float64": 64, "float32": 32}.get(plan.precision, 16)
    return StepBounds(
        costs.flops / card.flops[bits],
        (costs.moved_bytes + updated) / card.memory_rate,
        sum(each.seconds(card) for each in counted),
    )


def fitting_alternatives(
    resolved_spec: ResolvedSpec,
    plan: Plan,
    stats: ModelStats,
    resources: Resources,
    limit_bytes: float,
) -> Iterator[str]:
    """Options with which a plan that does not fit would, each with the fewest micro-batches.

    Pipelines are left out: what their stages need is known only when the layers are assigned.

    Args:
        resolved_spec: Spec of the plan.
        plan: Plan that does not fit.
        stats: Statistics of its data and model.
        resources: Resources for which it was made.
        limit_bytes: Bytes of memory of a GPU.
    """
    spec, host = resolved_spec.spec, resolved_spec.plugins

    def made(**fields: Any) -> tuple[ResolvedSpec, Plan] | None:
        """The plan with other fields of the spec, before its model is known; None if it is refused."""
        try:
            changed = ResolvedSpec(spec.replace(**fields), host)
            return changed, make_plan(
                changed, backend=plan.backend, replicas=None, resources=resources
            )
        except (PlanError, SpecError):
            return None

    def completed(**fields: Any) -> Plan | None:
        """The complete plan with other fields of the spec; None if it is refused, or has stages."""
        found = made(**fields)
        if found is None or STAGE in found[1].device_mesh.sizes:
            return None
        try:
            return complete_plan(found[1], found[0], stats)
        except (PlanError, SpecError):
            return None

    saving = {choice.label: choice for choice, _ in memory_saving_strategies(host)}
    choices = {"": spec.strategy, **saving}
    for argument, choice in choices.items():
        for factor in _micro_batch_factors(plan):
            count = plan.gradient_accumulation_steps * factor
            other = completed(strategy=choice, gradient_accumulation_steps=count)
            if other is None or _most_bytes(other) > limit_bytes:
                continue
            options = [f"--strategy {argument}"] if argument else []
            if factor > 1:
                options.append(f"--set gradient_accumulation_steps={count}")
            is_counted = other.activation_bytes is not None
            yield " ".join(options) + ("" if is_counted else ", without activations")
            break
    plan = _without_activations(plan)
    left = limit_bytes - needed_bytes(plan)
    can_fit = _most_bytes(plan) < limit_bytes and not spec.recompute
    if can_fit and made(recompute=["*"]) is not None:
        yield f"recompute, where it leaves {left / 2**30:.3g} GiB of activations or less"


def _without_activations(plan: Plan) -> Plan:
    """The plan as if its passes kept nothing."""
    if plan.stages is None:
        return replace(plan, activation_bytes=0)
    stages = [replace(each, activation_bytes=0) for each in plan.stages.stages]
    return replace(plan, stages=replace(plan.stages, stages=tuple(stages)))


def _micro_batch_factors(plan: Plan) -> list[int]:
    """Powers of two by which the micro-batches of a plan can be cut."""
    samples = max(plan.local_batch_sizes) / plan.gradient_accumulation_steps
    return [1 << power for power in range(1 + int(math.log2(max(1, samples))))]
