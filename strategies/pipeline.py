"""Pipeline parallelism: the model's layers are split into stages, through which micro-batches pass.

Huang et al., "GPipe" (NeurIPS 2019, arXiv 1811.06965); Narayanan et al., "PipeDream" (SOSP 2019, arXiv
1806.03377), here with one version of the weights and a flush in every step, so that it equals data
parallelism. Without a flush: `pipedream`, with weight stashing and an update for each micro-batch, as in the
paper; `2bw`, with two versions: Narayanan et al., "PipeDream-2BW" (2021, arXiv 2006.09503).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from isotrain.plugin import (
    DELAYED_SCHEDULES,
    STAGE,
    Action,
    Adapter,
    BackendConfig,
    Batch,
    Capability,
    DelayedUpdatesGroup,
    DeviceMesh,
    Invariant,
    ModelBytes,
    ModelProfile,
    PipelineBackend,
    PipelineGroup,
    PipelinePlan,
    PipelineShape,
    PipelineSplit,
    Plan,
    PlanError,
    ProcessContext,
    ReplicaGroup,
    ServerConnection,
    StateBytes,
    Strategy,
    StrategyState,
    Tensor,
    TrainingSpec,
    UnsupportedError,
    delayed_updates,
    idle_share,
    pipeline_plan,
    require,
    stage_actions,
    stage_versions,
    step_orders,
    time_line,
)
from isotrain.strategies import option_checks
from isotrain.strategies.replica_processes import SharedReplicaLayout


class PipelineLayout(SharedReplicaLayout):
    """One or several processes per stage of each replica."""

    name = "pipeline"

    def __init__(
        self, stages: int, split: PipelineSplit, stage_processes: tuple[int, ...] = ()
    ) -> None:
        """Keeps the stages of a replica, how the model is split, and the processes of each stage.

        Args:
            stages: Number of stages.
            split: Split of the model into chunks.
            stage_processes: Number of processes of each stage; empty where each has one.
        """
        super().__init__(STAGE, stages, "stage")
        self._split = split
        self._stage_processes = stage_processes

    def device_mesh(self, replicas: int) -> DeviceMesh:
        """A mesh [replicas, stages], in which a stage may have several positions."""
        return replace(super().device_mesh(replicas), stage_processes=self._stage_processes)

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
_STALE = (
    "pipeline: staleness: each stage computes a global batch with the weights before the last update, and"
    " keeps two versions of them"
)
_STASHED = (
    "pipeline: staleness: a gradient does not know of the last updates of its stage (by stage: {delays}). A"
    " step updates the stages {updates} times, each time by the mean gradient of a micro-batch per process,"
    " at the learning rate of the step"
)
_OWN_NORM = (
    "strategy pipeline: clip.global_norm: under schedule pipedream each stage is updated as soon as it has"
    " its gradients, and no process knows the norm of all. Use `value` or `norm`, or another schedule."
)
_SCALED = (
    "strategy pipeline: scaling: under schedule pipedream an update is by one micro-batch of each process,"
    " not by a global batch, which the rule counts. Leave `scaling` out and give the learning rate for such"
    " an update, or take another schedule."
)
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
    variants = ({"schedule": "2bw"}, {"schedule": "pipedream"})

    def __init__(
        self,
        stages: int | Sequence[int] = 2,
        schedule: str = "1f1b",
        chunks: int = 1,
        cut: Sequence[str] = (),
        gigabits: float = 10.0,
        modules: Sequence[str] = (),
        vertical_sync: bool = False,
    ) -> None:
        """Checks the options.

        Args:
            stages: Number of stages, each in a separate process; or the number of processes of each stage.
            schedule: `gpipe`, `1f1b`, `interleaved`, `2bw` or `pipedream`.
            chunks: Number of model chunks per stage; more than one for `interleaved`.
            cut: Names of the layers with which the chunks after the first begin; none to balance them.
            gigabits: Bandwidth between processes, in gigabits per second, for the plan's cost estimate.
            modules: For a native model with a custom `forward`: names, or patterns of names, of the modules
                that it applies one after the other; none where the model is sequential itself.
            vertical_sync: With `pipedream`: whether all stages compute a micro-batch with the version of the
                weights that the first stage has for it.

        Raises:
            PlanError: An option has a bad value.
        """
        self._processes = self._processes_of(stages)
        self._stages = len(self._processes)
        self._chunks = option_checks.whole_number(self.name, "chunks", chunks, 1)
        self._schedule = schedule
        self._modules = option_checks.names(modules)
        split = PipelineSplit(self._stages * chunks, option_checks.names(cut), self._modules)
        self.parallel_layout = PipelineLayout(self._stages, split, self._stage_processes)
        self._bandwidth = option_checks.positive(self.name, "gigabits", gigabits) * 1e9 / 8
        self._actions: list[list[Action]] = []
        self._is_delayed = schedule in DELAYED_SCHEDULES
        self._delayed_group: DelayedUpdatesGroup | None = None
        self._vertical_sync = option_checks.boolean(self.name, "vertical_sync", vertical_sync)
        self.updates_within_steps = schedule == "pipedream"
        self._updates_per_step = [1] * self._stages
        if vertical_sync and not self.updates_within_steps:
            raise PlanError(
                "strategy pipeline: vertical_sync: schedule 'pipedream' alone has it; received schedule"
                f" {schedule!r}."
            )
        if self._is_delayed:
            self.summary = (
                "stages without a flush, each updated by every micro-batch, with late gradients"
                if self.updates_within_steps
                else "stages that never wait for the end of a step; updates are one global batch late"
            )
            self.requires = frozenset({Capability.PIPELINE_STEP, Capability.DELAYED_UPDATES})
            self.equals_data_parallel = False
            self.convergence_margin = 0.1
        if self.updates_within_steps:  # for each step several gradients, of the size of one
            self.invariants = frozenset()

    def _processes_of(self, stages: Any) -> tuple[int, ...]:
        """Number of processes of each stage, from the option `stages`.

        Raises:
            PlanError: It is neither a whole number nor a list of such.
        """
        if isinstance(stages, list | tuple) and stages:
            return tuple(
                option_checks.whole_number(self.name, "stages", each, 1) for each in stages
            )
        return (1,) * option_checks.whole_number(self.name, "stages", stages, 1)

    @property
    def _stage_processes(self) -> tuple[int, ...]:
        """Number of processes of each stage; empty where each stage has one."""
        return self._processes if max(self._processes) > 1 else ()

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
        if self.updates_within_steps:
            if spec.clip is not None and spec.clip.global_norm is not None:
                raise UnsupportedError(_OWN_NORM)
            if spec.scaling.rule != "none":
                raise UnsupportedError(_SCALED)
        if self._modules and not isinstance(spec.model, Mapping):
            raise UnsupportedError(
                f"strategy {self.name}: modules: the layers of a portable model are taken from its graph."
                " Leave this option out."
            )
        orders = step_orders(self._schedule, self._shape(spec))
        timeline = time_line(orders, lambda work: self._processes[work.chunk % self._stages])
        assumption = "their passes take equally long"
        stages = str(self._stages)
        if self._stage_processes:
            stages += f", of {', '.join(map(str, self._processes))} processes"
            assumption = "the processes of a stage together are as fast as those of another"
        return [
            f"{self.name}: stages ({stages}) wait {idle_share(timeline, len(orders)):.0%} of a step where"
            f" {assumption} (gradient_accumulation_steps: {spec.gradient_accumulation_steps})",
            *self._staleness_notes(self._shape(spec)),
            *([_NOT_CAPTURED] if _would_be_captured(spec, plan) else []),
        ]

    def _staleness_notes(self, shape: PipelineShape) -> list[str]:
        """Notes on late updates; none for schedules without."""
        if not self.updates_within_steps:
            return [_STALE] if self._is_delayed else []
        versions = stage_versions(self._schedule, shape, self._vertical_sync)
        updates = dict.fromkeys(shape.micro_batches // each.update for each in versions)
        return [
            _STASHED.format(
                delays=", ".join(str(each.delay) for each in versions),
                updates=" or ".join(map(str, updates)),
            )
        ]

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        """Orders the passes of each process."""
        shape = self._shape(spec)
        if self._is_delayed:
            self._updates = delayed_updates(self._schedule, shape, self._vertical_sync)
            self._updates_per_step = [
                shape.micro_batches // each.update for each in self._updates.versions
            ]
        else:
            self._actions = stage_actions(step_orders(self._schedule, shape))

    def started(self, group: ReplicaGroup) -> None:
        """Lets the group keep versions of the weights where updates are delayed."""
        if self._is_delayed:
            self._delayed_group = require(group, DelayedUpdatesGroup)
            self._delayed_group.start_delayed_updates(self._updates)

    def _shape(self, spec: TrainingSpec) -> PipelineShape:
        return self._shape_of(spec.gradient_accumulation_steps)

    def _shape_of(self, micro_batches: int) -> PipelineShape:
        return PipelineShape(self._stages, micro_batches, self._chunks, self._stage_processes)

    def why_not_elastic(self) -> str:
        """Reason why the others cannot go on: a replica is several processes."""
        return (
            "the processes of a replica each have a stage of the model, and without one of them the others of"
            " that replica cannot step"
        )

    def pipeline_plan(self, profile: ModelProfile, slots: int, plan: Plan) -> PipelinePlan:
        """The stages with their layers, times and memory, from the profile."""
        shape = self._shape_of(plan.gradient_accumulation_steps)
        workers = plan.device_mesh.total_size
        return pipeline_plan(
            *(profile, self._schedule, shape, slots, workers, self._bandwidth, self._vertical_sync)
        )

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Runs this process's forward and backward passes of its stage; returns the mean loss, a scalar."""
        if self._is_delayed:
            return cast("DelayedUpdatesGroup", group).delayed_step(batch, learning_rate)
        return cast("PipelineGroup", group).pipeline_step(batch, learning_rate, self._actions)

    @contextmanager
    def evaluating(self, group: ReplicaGroup) -> Iterator[None]:
        """Gathers the weights of all stages on every process."""
        require(group, PipelineGroup).gather_stages()
        yield

    def finished(self, group: ReplicaGroup) -> None:
        """Gathers the weights of all stages on every process."""
        require(group, PipelineGroup).gather_stages()

    def state(self, group: ReplicaGroup) -> StrategyState:
        """Nothing; the group holds all state, once it has done the update of the last global batch.

        Called on every process at the same point.
        """
        if self._is_delayed:
            require(group, DelayedUpdatesGroup).drain_pipeline()
        return StrategyState()

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Says that the first update is not delayed, where the checkpoint has no earlier versions."""
        group = self._delayed_group
        is_same = strategy_before == self.name
        is_late = self._schedule == "2bw" or (self.updates_within_steps and self._stages > 1)
        if not is_late or (is_same and (group is None or not group.has_equal_versions())):
            return []
        first = "updates are" if self.updates_within_steps else "update is"
        return [
            f"{self.name}: starts with equal versions of the weights; the first {first} not late"
        ]

    def report(self) -> Mapping[str, Any]:
        """Staleness: updates of its stage that a gradient does not know of when it is applied, by stage."""
        if not self._is_delayed:
            return {}
        return {"staleness": [each.delay for each in self._updates.versions]}

    def state_bytes(self, model: ModelBytes, replicas: int) -> StateBytes:
        """Bytes on the largest stage, if the model is split so that it is as small as possible.

        Weights count in full: for evaluation every process has all of them.
        """
        chunks = _balanced_chunks(model.weights, self._stages * self._chunks)
        stages = [sum(chunks[stage :: self._stages]) for stage in range(self._stages)]
        delays, largest = [0] * self._stages, max(stages)
        if self._is_delayed:
            # Delays do not depend on the number of micro-batches.
            shape = self._shape_of(max(self._processes))
            versions = stage_versions(self._schedule, shape, self._vertical_sync)
            delays = [each.delay for each in versions]
        return StateBytes(
            model.replicated.weights + max(map(operator.mul, delays, stages)),
            2 * largest if self._schedule == "2bw" else largest,
            largest * model.slots,
        )

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes of ring all-reduces of gradients over the processes of each stage; the plan adds activations.

        They are those that a process sends on average, if all stages have as many weights.
        """
        exchanged = sum(
            2 * (replicas * count - 1) / replicas * updates
            for count, updates in zip(self._processes, self._updates_per_step, strict=True)
        )
        return exchanged * gradient_bytes / self._stages / sum(self._processes)


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
