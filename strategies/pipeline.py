"""Pipeline parallelism: the model's layers are split into stages, through which micro-batches pass.

Huang et al., "GPipe" (NeurIPS 2019, arXiv 1811.06965); Narayanan et al., "PipeDream" (SOSP 2019, arXiv
1806.03377), here with one version of the weights and a flush in every step, so that it equals data
parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from isotrain.plugin import (
    STAGE,
    Action,
    Adapter,
    BackendConfig,
    Batch,
    Capability,
    Invariant,
    ModelBytes,
    ModelProfile,
    Order,
    PipelineBackend,
    PipelineGroup,
    PipelinePlan,
    PipelineShape,
    PipelineSplit,
    Plan,
    ProcessContext,
    ReplicaGroup,
    ServerConnection,
    StateBytes,
    Strategy,
    Tensor,
    TrainingSpec,
    UnsupportedError,
    pipeline_bubble,
    pipeline_plan,
    require,
    stage_actions,
    stage_orders,
)
from isotrain.strategies import option_checks
from isotrain.strategies.replica_processes import SharedReplicaLayout


class PipelineLayout(SharedReplicaLayout):
    """One process per stage of each replica."""

    name = "pipeline"

    def __init__(self, stages: int, split: PipelineSplit) -> None:
        """Keeps the number of stages of a replica, and how the model is split."""
        super().__init__(STAGE, stages, "stage")
        self._split = split

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        server_connection: ServerConnection | None = None,
    ) -> ReplicaGroup:
        """Opens the group of this process, one stage of a replica."""
        backend = require(adapter, PipelineBackend)
        return backend.start_pipeline(spec, backend_config, context, self._split)


_REFUSED_FIELDS = {
    "objective": "it calls the whole model, which is split into stages; give a loss",
    "call": "it calls the whole model, which is split into stages; leave it out",
}
"""Spec fields that stages cannot support, with the reason."""
_NOT_CAPTURED = "training steps of stages are computed by Keras, and not replayed from a CUDA graph"


class Pipeline(Strategy):
    """Every step, the micro-batches of a replica's slice pass forward and backward through its stages."""

    name = "pipeline"
    summary = "synchronous: layers in stages, one process each, through which micro-batches pass"
    requires = frozenset({Capability.PIPELINE_STEP})
    parallel_layout = PipelineLayout(2, PipelineSplit(2))
    keeps_replicas_equal = "always"
    equals_data_parallel = True
    invariants = frozenset({Invariant.GRADIENT_SUM})
    memory_saving = ({"stages": 2}, {"stages": 4})

    def __init__(
        self,
        stages: int = 2,
        schedule: str = "1f1b",
        chunks: int = 1,
        cut: Sequence[str] = (),
        gigabits: float = 10.0,
        modules: Sequence[str] = (),
    ) -> None:
        """Checks the options.

        Args:
            stages: Number of stages, each in a separate process.
            schedule: `gpipe`, `1f1b` or `interleaved`.
            chunks: Number of model chunks per stage; more than one for `interleaved`.
            cut: Names of the layers with which the chunks after the first begin; none to balance them.
            gigabits: Bandwidth between processes, in gigabits per second, for the plan's cost estimate.
            modules: For a native model with a custom `forward`: names, or patterns of names, of the modules
                that it applies one after the other; none where the model is sequential itself.

        Raises:
            PlanError: An option has a bad value.
        """
        self._stages = option_checks.whole_number(self.name, "stages", stages, 1)
        self._chunks = option_checks.whole_number(self.name, "chunks", chunks, 1)
        self._schedule = schedule
        self._modules = option_checks.names(modules)
        split = PipelineSplit(stages * chunks, option_checks.names(cut), self._modules)
        self.parallel_layout = PipelineLayout(stages, split)
        self._bandwidth = option_checks.positive(self.name, "gigabits", gigabits) * 1e9 / 8
        self._orders: list[Order] = []
        self._actions: list[list[Action]] = []

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses what stages cannot support, and notes the pipeline bubble.

        Raises:
            UnsupportedError: The spec has such a field, precision or optimizer.
        """
        option_checks.refuse_float16(self.name, spec, "scales no losses")
        option_checks.refuse_custom_optimizer(self.name, spec)
        for field, why in _REFUSED_FIELDS.items():
            if getattr(spec, field):
                raise UnsupportedError(f"strategy {self.name}: {field}: {why}.")
        if self._modules and not isinstance(spec.model, Mapping):
            raise UnsupportedError(
                f"strategy {self.name}: modules: the layers of a portable model are taken from its graph."
                " Leave this option out."
            )
        shape = self._shape(spec)
        stage_orders(self._schedule, shape)
        return [
            f"{self.name}: stages ({self._stages}) wait {pipeline_bubble(shape):.0%} of a step where their"
            f" passes take equally long (gradient_accumulation_steps: {spec.gradient_accumulation_steps})",
            *([_NOT_CAPTURED] if _would_be_captured(spec, plan) else []),
        ]

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        """Orders the passes of each stage."""
        self._orders = stage_orders(self._schedule, self._shape(spec))
        self._actions = stage_actions(self._orders)

    def _shape(self, spec: TrainingSpec) -> PipelineShape:
        return PipelineShape(self._stages, spec.gradient_accumulation_steps, self._chunks)

    def pipeline_plan(self, profile: ModelProfile, slots: int, plan: Plan) -> PipelinePlan:
        """The stages with their layers, times and memory, from the profile."""
        return pipeline_plan(
            profile, self._orders, slots, plan.device_mesh.total_size, self._bandwidth
        )

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Runs forward and backward passes of this process's stage; returns the mean loss, a scalar."""
        return cast("PipelineGroup", group).pipeline_step(batch, learning_rate, self._actions)

    @contextmanager
    def evaluating(self, group: ReplicaGroup) -> Iterator[None]:
        """Gathers the weights of all stages on every process."""
        require(group, PipelineGroup).gather_stages()
        yield

    def finished(self, group: ReplicaGroup) -> None:
        """Gathers the weights of all stages on every process."""
        require(group, PipelineGroup).gather_stages()

    def state_bytes(self, model: ModelBytes, replicas: int) -> StateBytes:
        """Bytes on the largest stage, if the model is split so that it is as small as possible.

        Weights count in full: for evaluation every process has all of them.
        """
        largest = self._largest_stage(model.weights)
        return StateBytes(model.replicated.weights, largest, largest * model.slots)

    def _largest_stage(self, weights: Sequence[int]) -> int:
        """Bytes of weights of the largest stage, of these weights in bytes."""
        chunks = _balanced_chunks(weights, self._stages * self._chunks)
        return max(sum(chunks[stage :: self._stages]) for stage in range(self._stages))

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes of a ring all-reduce of gradients over a stage's replicas; the plan adds activations."""
        return 2 * (replicas - 1) / replicas * gradient_bytes / self._stages


def _balanced_chunks(sizes: Sequence[int], count: int) -> list[int]:
    """Linear partition: sums of at most `count` runs of sizes, the largest sum minimal (binary search)."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        if len(_filled_chunks(sizes, limit)) > count:
            low = limit + 1
        else:
            high = limit
    return _filled_chunks(sizes, low)


def _filled_chunks(sizes: Sequence[int], limit: int) -> list[int]:
    """Sums of runs of consecutive sizes, each filled up to a limit that no single size exceeds."""
    sums = [0]
    for size in sizes:
        if sums[-1] + size > limit:
            sums.append(0)
        sums[-1] += size
    return sums


def _would_be_captured(spec: TrainingSpec, plan: Plan) -> bool:
    """Whether, without stages, steps would be replayed from a captured CUDA graph."""
    return spec.capture and plan.framework == "torch" and not isinstance(spec.model, Mapping)
