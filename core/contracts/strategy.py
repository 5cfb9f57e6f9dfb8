"""The contract of a strategy: what each replica computes in a step, and what replicas communicate when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.parallel_layout import REPLICATED, ParallelLayout
from isotrain.core.contracts.state import ModelBytes, StateBytes
from isotrain.core.errors import UnsupportedError

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.replica import Tensor
    from isotrain.core.contracts.backend.replica_group import ReplicaGroup
    from isotrain.core.contracts.plan import Plan
    from isotrain.core.data.batch import Batch
    from isotrain.core.pipeline.pipeline_plan import PipelinePlan
    from isotrain.core.pipeline.profile import ModelProfile
    from isotrain.core.spec.training_spec import TrainingSpec


if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StrategyState:
    """State of a strategy besides weights and optimizer state, as checkpoints store it.

    Attributes:
        values: JSON values, equal on all ranks.
        tensors: Name to array of any shape and dtype, equal on all ranks.
        per_replica: Replica index to that replica's arrays by name; only replicas of this process.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Arrays = field(default_factory=dict)
    per_replica: Mapping[int, Arrays] = field(default_factory=dict)


class Invariant(StrEnum):
    """A quantity that a strategy's communication preserves; the conformance kit checks it.

    `parameter-mean`: communication does not change the mean of the parameters over all replicas; only local
    steps do.
    `gradient-sum`: every part of a gradient is applied in the end; residuals stay bounded (error feedback).
    """

    PARAMETER_MEAN = "parameter-mean"
    GRADIENT_SUM = "gradient-sum"


class Strategy(ABC):
    """A training strategy, such as synchronous data parallelism or local SGD. Knows no framework.

    One instance lives in each process. Its options are the keyword arguments of its constructor. The
    attributes below are promises that `isotrain conformance` checks; where one depends on an option, the
    constructor sets it on the instance.

    Attributes:
        name: Name under which it is registered.
        summary: One line for listings. An instance may override it where an option changes the method.
        requires: Capabilities that it needs of a backend under its parallel layout; the plan refuses backends
            that lack one. An instance may need more than its class, where an option does.
        prefers: Capabilities that it uses where the backend has them, each with what it does without, for a
            note of the plan.
        parallel_layout: Layout of weights and optimizer state over the processes; it says which
            processes step.
        keeps_replicas_equal: Time at which the weights of all replicas are bitwise equal: after every step
            (`always`), after `finished` (`finally`), or `never`.
        equals_data_parallel: Whether, with plain SGD, the weights after every step are those of synchronous
            data parallelism, up to rounding, for losses that weigh all targets alike.
        updates_within_steps: Whether it updates weights several times in a step, by parts of its global
            batch, so that the loss of a step is a mean of losses with different weights.
        steps_named_updates: Whether one instance can step the groups of several named updates by turns: it
            keeps nothing from step to step.
        applies_ordered_sums: Whether `apply_gradients` can take the place of `step` where the spec is
            `reproducible`, which computes the mean gradients in an order of its own. Strategies that require
            `synchronous-step` alone can.
        invariants: Quantities that its communication preserves.
        memory_saving: Sets of options with which a replica needs less memory than under data parallelism,
            smallest saving first; `isotrain check` suggests them where a model does not fit.
        variants: Sets of options that need other capabilities; each has its own row in
            `isotrain strategies`.
        warm_up_steps: Number of steps at the start of a process in which it may communicate otherwise, as
            DistributedDataParallel does, which rebuilds its buckets in the second.
        period: Number of steps after which its communication repeats; plans count it over so many.
        convergence_margin: Accuracy, as a fraction, by which it may be worse than synchronous data
            parallelism on the kit's digits data.
    """

    name: ClassVar[str]
    summary: str
    requires: frozenset[Capability]
    prefers: Mapping[Capability, str] = MappingProxyType({})
    parallel_layout: ParallelLayout = REPLICATED
    keeps_replicas_equal: Literal["always", "finally", "never"] = "finally"
    equals_data_parallel: bool = False
    updates_within_steps: bool = False
    steps_named_updates: bool = False
    applies_ordered_sums: bool = False
    invariants: frozenset[Invariant] = frozenset()
    memory_saving: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    warm_up_steps: int = 2
    period: int = 1
    convergence_margin: float = 0.05

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Checks the options against the run, and stores nothing. Local.

        Called once for each plan that is made, also for one with a single replica whatever the options: data
        and model are measured on one.

        Args:
            spec: Training spec.
            plan: Plan of the run, without measurements of the data and model.

        Returns:
            Notes for the plan: what fields of the spec mean under this strategy.

        Raises:
            PlanError: The options do not fit the run.
            UnsupportedError: The strategy does not support something in the spec.
        """
        return []

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:  # noqa: B027  # as above
        """Stores what the strategy needs of the plan. Local.

        Called once, with the numbers of steps and parameters filled in, before all methods but `validate`: on
        every process of a run before `started`. In an elastic run, once for each process group.

        Args:
            spec: Training spec.
            plan: Complete plan of the run.

        Raises:
            PlanError: The options do not fit the model.
        """

    def started(self, group: ReplicaGroup) -> None:  # noqa: B027  # doing nothing is a fine choice
        """Hook before the first step. Called once on every process with a session.

        In an elastic run it is called in each process group, once on every member.
        """

    def state_written(self, group: ReplicaGroup) -> None:  # noqa: B027  # doing nothing is a fine choice
        """Hook after `session.write_state` on every process: copies of weights kept here are outdated."""

    def state(self, group: ReplicaGroup) -> StrategyState:
        """The strategy's own state, for a checkpoint. Local.

        Called between two steps; later steps must not change the arrays that it returned.
        """
        return StrategyState()

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:  # noqa: B027  # as above
        """Restores what `state` of the same strategy returned. Local.

        Called after `started`, once the group's weights and optimizer state are restored. If the number of
        replicas changed, `state.per_replica` is empty and `state_written` was called before.
        """

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Lists what of the strategy's own state is lost when a run resumes under other conditions.

        After a change of strategy the run resumes from the weights alone: `load_state` is not called.

        Args:
            strategy_before: Name of the strategy in the checkpoint.
            replicas_before: Number of replicas in the checkpoint.
            replicas: Number of replicas from now on.

        Returns:
            One sentence for each loss; empty for a strategy without state.

        Raises:
            UnsupportedError: The strategy cannot resume from such a checkpoint.
        """
        if type(self).state is Strategy.state:
            return []
        if strategy_before != self.name:
            return [f"{self.name}: starts without state from the steps before"]
        if replicas_before != replicas:
            return [f"{self.name}: its state per replica is lost"]
        return []

    def why_not_elastic(self) -> str | None:
        """Reason why the other replicas cannot go on when one is lost (`elastic`); None: they can.

        They can where each replica has all state, nothing of it is the strategy's own, and a step ends its
        exchanges before it changes weights or optimizer state: one that is broken off has changed neither.
        They also can where all have the same weights after some steps (`is_savepoint`).
        `isotrain conformance` checks it. By default None for replicated weights, where it requires
        `synchronous-step` alone and has no `state`.
        """
        is_replicated = self.parallel_layout.name == REPLICATED.name
        is_native = self.requires == {Capability.SYNCHRONOUS_STEP}
        if is_replicated and is_native and type(self).state is Strategy.state:
            return None
        return (
            "it does not say whether its other replicas can go on when one is lost: override"
            " `why_not_elastic` to say that they can, which `isotrain conformance` then checks"
        )

    def is_savepoint(self, step: int) -> bool | None:
        """Whether an elastic run can go back to the state after a step, as all replicas then have the same.

        By default None: no replica has to go back, as a step that is broken off has changed nothing.
        Otherwise each process keeps a copy of the weights, the optimizer state, and `values` and `tensors` of
        the strategy's state after such a step. Once a process is lost, the others take the steps since then
        again. New processes join after such a step.

        Args:
            step: Index of the step; the answer depends on it alone.
        """
        return None

    def pipeline_plan(self, profile: ModelProfile, slots: int, plan: Plan) -> PipelinePlan | None:
        """Assigns the layers of a model to pipeline stages; None for strategies without stages.

        Args:
            profile: Time and memory of each layer, as the group measured them.
            slots: Optimizer state tensors of a weight's size per weight.
            plan: Plan of the run.
        """
        return None

    @abstractmethod
    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Trains on one global batch. Called on every process with a session.

        Args:
            group: The replicas of this process.
            batch: This process's slices of the global batch, on the device.
            learning_rate: Learning rate of this step.

        Returns:
            Mean loss of the global batch, a scalar tensor, equal on all replicas.
        """

    def apply_gradients(
        self, group: ReplicaGroup, gradients: Sequence[Sequence[Tensor]], learning_rate: float
    ) -> None:
        """Updates the weights by mean gradients that every replica has. Called as `step` is, in its place.

        Args:
            group: The replicas of this process.
            gradients: For each local replica the mean gradients over the global batch, equal to the bit on
                all replicas: one of each trainable weight's shape, in the order of the weights' names.
            learning_rate: Learning rate of this step.
        """
        group.apply_gradients(gradients, learning_rate)

    def evaluating(self, group: ReplicaGroup) -> AbstractContextManager[None]:
        """Context in which replicas hold the weights to evaluate, such as averages. Called on every process.

        On exit they hold the training weights again. By default each replica evaluates its own weights.
        """
        return nullcontext()

    def finished(self, group: ReplicaGroup) -> None:  # noqa: B027  # as above
        """Hook after the last step, before the final weights are read. Called once on every process."""

    def report(self) -> Mapping[str, Any]:
        """Measurements of the strategy for the run's result, as JSON values. Called on rank 0."""
        return {}

    def state_bytes(self, model: ModelBytes, replicas: int) -> StateBytes:
        """Bytes of weights, gradients and optimizer state on the replica that holds most of them.

        The strategy's own state is not counted.
        """
        return model.replicated

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float | None:
        """Bytes that each replica sends per step, on average; None: as the backend estimates it."""
        return None

    def update_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes that each replica sends in `apply_gradients`."""
        return 0.0


def require_backend_step(
    strategy: Strategy, user: str, others: str = "strategy data-parallel"
) -> None:
    """Refuses what reads and applies gradients under a strategy with a step of its own.

    Args:
        strategy: Strategy of the run.
        user: What reads them, for the message.
        others: Strategies that have no such step, for the message.

    Raises:
        UnsupportedError: The strategy has a step of its own.
    """
    if strategy.requires != {Capability.SYNCHRONOUS_STEP}:
        raise UnsupportedError(
            f"{user}: it takes the mean gradients of each step, and strategy {strategy.name!r} exchanges or"
            f" applies them in its own way. Use {others}."
        )
