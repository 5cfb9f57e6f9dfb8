"""The contract of a strategy: how replicas cooperate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isotrain.core.contracts.capabilities import Capability
from isotrain.core.contracts.parallel_layout import REPLICATED, ParallelLayout
from isotrain.core.contracts.state import ModelBytes, StateBytes

if TYPE_CHECKING:
    from isotrain.core.contracts.plan import Plan
    from isotrain.core.contracts.replica import Tensor
    from isotrain.core.contracts.replica_group import ReplicaGroup
    from isotrain.core.data.batch import Batch
    from isotrain.core.pipeline.pipeline_plan import PipelinePlan
    from isotrain.core.pipeline.profile import ModelProfile
    from isotrain.core.spec.training_spec import TrainingSpec


if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StrategyState:
    """What a strategy keeps besides the state of its replicas.

    Attributes:
        values: JSON values, equal on every process.
        tensors: Arrays by name, equal on every process.
        per_replica: Arrays by name of each replica of this process, by its index in the run.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Arrays = field(default_factory=dict)
    per_replica: Mapping[int, Arrays] = field(default_factory=dict)


class Invariant(StrEnum):
    """What a strategy's exchange can leave as it is.

    `parameter-mean`: the mean over all replicas of the parameters changes by local steps only.
    `gradient-sum`: all that gradients ask for arrives in the end; what is held back does not grow.
    """

    PARAMETER_MEAN = "parameter-mean"
    GRADIENT_SUM = "gradient-sum"


class Strategy(ABC):
    """What is computed locally and what is exchanged when; neutral to frameworks.

    One instance lives in each process. Its options are the keyword arguments of its constructor. What it
    promises below is checked by `isotrain conformance`; where it depends on options, the constructor sets
    it on the instance.

    Attributes:
        name: The name it is registered under.
        summary: One line for listings; an instance may say it otherwise, where options change it.
        requires: What it asks of a backend's groups of its parallel layout; a backend that lacks one of
            these is refused by the plan. An instance may ask for more than its class, where an option needs
            it.
        parallel_layout: How weights and other state lie over the processes, and who steps.
        keeps_replicas_equal: When all replicas have the same weights, to the bit: after every step
            (`always`), after `finished` (`finally`), or `never`.
        equals_data_parallel: Whether, with plain SGD, its weights are after every step those of
            synchronous data parallelism, up to rounding, where the loss counts all targets alike.
        invariants: What its exchange leaves as it is.
        memory_saving: Options with which a replica takes less memory than in data-parallel runs, what
            spares least
            first: what `isotrain check` advises where a model does not fit.
        variants: Options with which it asks other things of backends: each has a row of its own in
            `isotrain strategies`.
        convergence_margin: By how much its accuracy on the kit's digits may be below that of synchronous
            data parallelism.
    """

    name: ClassVar[str]
    summary: str
    requires: frozenset[Capability]
    parallel_layout: ParallelLayout = REPLICATED
    keeps_replicas_equal: Literal["always", "finally", "never"] = "finally"
    equals_data_parallel: bool = False
    invariants: frozenset[Invariant] = frozenset()
    memory_saving: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    convergence_margin: float = 0.05

    def configure(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Called first of all, with what the run will be; keeps of it what the strategy needs.

        Once while the plan is made, then (with the numbers of steps and parameters) before
        `exchanged_bytes` and, on every process, before `started`. Where it is told of several plans, the
        last is the one that counts. One may have a single replica, whatever the options: so data and model
        are looked at for a measured plan or a check of any number.

        Returns:
            Remarks on what the spec's fields mean under this strategy, for the plan.

        Raises:
            PlanError: The options do not fit the run.
            UnsupportedError: The spec asks for something that this strategy cannot honour.
        """
        return []

    def started(self, group: ReplicaGroup) -> None:  # noqa: B027  # doing nothing is a fine choice
        """Called once on every process before the first step."""

    def state_written(self, group: ReplicaGroup) -> None:  # noqa: B027  # doing nothing is a fine choice
        """Called on every process after `session.write_state`; what was kept of the weights is old."""

    def state(self, group: ReplicaGroup) -> StrategyState:
        """Gives what it keeps from step to step besides the state of its replicas. Local.

        Called between two steps; the step does not change what was given.
        """
        return StrategyState()

    def load_state(self, group: ReplicaGroup, state: StrategyState) -> None:  # noqa: B027  # as above
        """Goes on from what `state` of the same strategy gave; the group has its own state back. Local.

        Called after `started`. Where the run had another number of replicas, `state.per_replica` is empty
        and `state_written` was called before.
        """

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Says what a run loses of this strategy's own state when it goes on as something else.

        With another strategy's name it goes on from the weights alone: `load_state` is not called.

        Args:
            strategy_before: The name of the strategy until now.
            replicas_before: How many there were.
            replicas: How many there will be.

        Returns:
            A sentence for each thing that is lost; nothing where the strategy keeps nothing.

        Raises:
            UnsupportedError: It cannot go on.
        """
        if type(self).state is Strategy.state:
            return []
        if strategy_before != self.name:
            return [f"{self.name}: starts with nothing kept from the steps before"]
        if replicas_before != replicas:
            return [f"{self.name}: what it kept for each replica is lost"]
        return []

    def pipeline_plan(self, profile: ModelProfile, slots: int, plan: Plan) -> PipelinePlan | None:
        """Draws how the layers of a model lie in stages; None where they do not.

        Args:
            profile: Of the model, as the group timed it.
            slots: How many of a weight's size the optimizer has for each.
            plan: Of the run.
        """
        return None

    @abstractmethod
    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Trains on one global batch, on every process; returns its mean loss (a scalar tensor)."""

    def evaluating(self, group: ReplicaGroup) -> AbstractContextManager[None]:
        """Called on every process; within it the replicas hold the weights that are evaluated.

        Afterwards they hold again what they held. By default each evaluates on what it has.
        """
        return nullcontext()

    def finished(self, group: ReplicaGroup) -> None:  # noqa: B027  # as above
        """Called once on every process after the last step, before the final weights are read."""

    def report(self) -> Mapping[str, Any]:
        """What the strategy measured in the run, as JSON values, for the result; of rank 0."""
        return {}

    def state_bytes(self, model: ModelBytes, replicas: int) -> StateBytes:
        """What the state of the model takes on the replica that has most of it.

        What the strategy keeps besides is not counted.
        """
        return model.replicated

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float | None:
        """Bytes that each replica sends per step on average; None leaves it to the backend."""
        return None
