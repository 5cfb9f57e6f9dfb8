"""Pipeline parallelism: the layers of a model in stages, through which micro-batches pass in turn.

Huang et al., "GPipe" (NeurIPS 2019, arXiv 1811.06965); Narayanan et al., "PipeDream" (SOSP 2019, arXiv
1806.03377), here with one set of weights and a flush in every step, so that it equals data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from isotrain.plugin import (
    DATA,
    STAGE,
    Action,
    Adapter,
    BackendConfig,
    Batch,
    Capability,
    DeviceMesh,
    Invariant,
    ModelBytes,
    ModelProfile,
    Order,
    ParallelLayout,
    PipelinePlan,
    PipelineShape,
    PipelineSplit,
    Plan,
    ProcessContext,
    ProcessRole,
    ReplicaGroup,
    ServerConnection,
    StateBytes,
    Strategy,
    Tensor,
    TrainingSpec,
    UnsupportedError,
    pipeline_bubble,
    pipeline_plan,
    stage_actions,
    stage_orders,
)
from isotrain.strategies import option_checks


class PipelineLayout(ParallelLayout):
    """The stages of a replica are neighbours; all of them have its slice of every global batch."""

    name = "pipeline"

    def __init__(self, stages: int, cut: PipelineSplit) -> None:
        """Lays out so many.

        Args:
            stages: Of each replica.
            cut: Of the model.
        """
        self._stages = stages
        self._cut = cut

    def device_mesh(self, replicas: int) -> DeviceMesh:
        """The stages of a replica vary fastest."""
        return DeviceMesh({DATA: replicas, STAGE: self._stages})

    def process_roles(self, adapter: Adapter, replicas: int) -> tuple[ProcessRole, ...]:
        """A process for each stage of each replica.

        Raises:
            UnsupportedError: The backend has all replicas in one process.
        """
        if adapter.replicas_per_process == "all":
            raise UnsupportedError(
                f"backend {adapter.name!r} has all replicas in one process, and stages need one each."
            )
        mesh = self.device_mesh(replicas)
        places = range(mesh.total_size)
        return tuple(ProcessRole((mesh.coordinates(place)[DATA],)) for place in places)

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        server_connection: ServerConnection | None = None,
    ) -> ReplicaGroup:
        """Joins the run as a stage of a replica."""
        return adapter.start_pipeline(spec, backend_config, context, self._cut)


_REFUSED = {
    "objective": "it calls the whole model, which is in stages; give a loss",
}
"""Fields of the spec, and why stages cannot honour them."""
_UNRECORDED = "training steps of stages are computed by Keras, and not replayed from a record"


class Pipeline(Strategy):
    """Every step, the micro-batches of a replica's slice pass through its stages, forward and backward."""

    name = "pipeline"
    summary = (
        "synchronous: layers in stages on processes of their own, through which micro-batches pass"
    )
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
            stages: On processes of their own.
            schedule: `gpipe`, `1f1b` or `interleaved`.
            chunks: Of the model on each stage; `interleaved` has several.
            cut: The names of the layers with which the chunks after the first begin; none to balance them.
            gigabits: A second, between processes: what the plan weighs sending by.
            modules: Of a native model with a `forward` of its own, the names, or patterns of names, of the
                modules that it applies one after the other; none where the model says so itself.
        """
        self._stages = option_checks.whole(self.name, "stages", stages, 1)
        self._chunks = option_checks.whole(self.name, "chunks", chunks, 1)
        self._schedule = schedule
        self._modules = _names(modules)
        model_cut = PipelineSplit(stages * chunks, _names(cut), self._modules)
        self.parallel_layout = PipelineLayout(stages, model_cut)
        self._bandwidth = option_checks.positive(self.name, "gigabits", gigabits) * 1e9 / 8
        self._orders: list[Order] = []
        self._actions: list[list[Action]] = []

    def configure(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses what stages cannot honour; orders the passes, and says how long stages wait.

        Raises:
            UnsupportedError: The spec asks for something of the kind.
        """
        option_checks.without_loss_scaling(self.name, spec, "scales no losses")
        option_checks.without_own_optimizer(self.name, spec)
        for field, why in _REFUSED.items():
            if getattr(spec, field):
                raise UnsupportedError(f"strategy {self.name}: {field}: {why}.")
        if self._modules and not isinstance(spec.model, Mapping):
            raise UnsupportedError(
                f"strategy {self.name}: modules: the model is a portable one, whose graph has its layers;"
                " leave them out."
            )
        shape = PipelineShape(self._stages, spec.gradient_accumulation_steps, self._chunks)
        self._orders = stage_orders(self._schedule, shape)
        self._actions = stage_actions(self._orders)
        return [
            f"{self.name}: {self._stages} stages, {spec.gradient_accumulation_steps}"
            " micro-batches (`gradient_accumulation_steps`): stages wait"
            f" {pipeline_bubble(shape):.0%} of a step where their passes take equally long",
            *([_UNRECORDED] if _is_recorded(spec, plan) else []),
        ]

    def pipeline_plan(self, profile: ModelProfile, slots: int, plan: Plan) -> PipelinePlan:
        """Draws the stages as their layers were timed."""
        return pipeline_plan(
            profile, self._orders, slots, plan.device_mesh.total_size, self._bandwidth
        )

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Does the actions of this process's stage."""
        return group.pipeline_step(batch, learning_rate, self._actions)

    @contextmanager
    def evaluating(self, group: ReplicaGroup) -> Iterator[None]:
        """Has all weights on all processes."""
        group.gather_stages()
        yield

    def finished(self, group: ReplicaGroup) -> None:
        """Leaves all weights on all processes."""
        group.gather_stages()

    def state_bytes(self, model: ModelBytes, replicas: int) -> StateBytes:
        """Of the stage that has most, where the cuts leave that as little as weights in their order allow.

        At its most a process has all weights, with which the model is evaluated.
        """
        most = self._largest_share(model.weights)
        return StateBytes(model.replicated.weights, most, most * model.slots)

    def _largest_share(self, weights: Sequence[int]) -> int:
        """Of the stages, in bytes of weights."""
        parts = _parts(weights, self._stages * self._chunks)
        return max(sum(parts[stage :: self._stages]) for stage in range(self._stages))

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Of gradients, by an optimal all-reduce over the replicas of a stage; the plan adds activations."""
        return 2 * (replicas - 1) / replicas * gradient_bytes / self._stages


def _parts(sizes: Sequence[int], count: int) -> list[int]:
    """At most so many sums of sizes that follow each other, of which the largest is as small as it can be."""
    least, most = max(sizes, default=0), sum(sizes)
    while least < most:
        limit = (least + most) // 2
        if len(_filled(sizes, limit)) > count:
            least = limit + 1
        else:
            most = limit
    return _filled(sizes, least)


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """Sums of sizes that follow each other, each filled up to a limit that no size exceeds."""
    parts = [0]
    for size in sizes:
        if parts[-1] + size > limit:
            parts.append(0)
        parts[-1] += size
    return parts


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    """A single name is one without brackets on the command line."""
    return (given,) if isinstance(given, str) else tuple(given)


def _is_recorded(spec: TrainingSpec, plan: Plan) -> bool:
    """Whether without stages the model would be replayed from a record."""
    return spec.capture and plan.framework == "torch" and not isinstance(spec.model, Mapping)
