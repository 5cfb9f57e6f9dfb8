"""Training through a parameter server: synchronous, with bounded staleness, or asynchronous.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014); Dean et al., "Large
Scale Distributed Deep Networks" (NIPS 2012), for asynchronous updates; Ho et al., "More Effective Distributed
ML via a Stale Synchronous Parallel Parameter Server" (NIPS 2013), for the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from isotrain.plugin import (
    Batch,
    Capability,
    Invariant,
    ParameterServerGroup,
    ParameterServerLayout,
    Plan,
    ReplicaGroup,
    Strategy,
    Tensor,
    TrainingSpec,
    require,
)
from isotrain.strategies import option_checks


class ParameterServer(Strategy):
    """Workers compute the gradients of slices; the parameter server applies them as they arrive."""

    name = "parameter-server"
    summary = "workers send gradients to a server, synchronously or with stale weights; may be lost"
    requires = frozenset({Capability.PARAMETER_SERVER_STEP, Capability.SYNCHRONOUS_STEP})
    parallel_layout = ParameterServerLayout()
    keeps_replicas_equal = "always"
    invariants = frozenset({Invariant.GRADIENT_SUM})

    def __init__(self, staleness: int | None = 0, servers: int = 1) -> None:
        """Checks the options.

        Args:
            staleness: Maximum number of global batches by which the weights of a slice may lag behind; 0 is
                synchronous, None is asynchronous.
            servers: Number of server processes, on backends that have them.

        Raises:
            PlanError: An option has a bad value.
        """
        self.parallel_layout = ParameterServerLayout(
            option_checks.whole_number(self.name, "servers", servers, 1)
        )
        if staleness is not None:
            option_checks.whole_number(self.name, "staleness", staleness, 0)
        self._staleness = staleness
        self.equals_data_parallel = staleness == 0
        self._group: ReplicaGroup | None = None

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses float16, and notes what an update is."""
        option_checks.refuse_float16(self.name, spec, "sends gradients without a loss scale")
        if plan.replicas == 1 or self._staleness == 0:
            return []
        notes = [
            f"parameter-server: each of the {plan.replicas} slices of a global batch is a separate update,"
            f" with 1/{plan.replicas} of the learning rate"
        ]
        if spec.clip is not None:
            notes.append("parameter-server: clip is applied to the gradient of each slice")
        return notes

    def started(self, group: ReplicaGroup) -> None:
        """Keeps the group, for `report`."""
        self._group = group

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Distributes the batch's slices to workers; returns the mean loss, a scalar.

        A single replica takes a synchronous step.
        """
        if group.replicas == 1:
            return group.synchronous_step(batch, learning_rate)
        coordinator = cast("ParameterServerGroup", group)
        return coordinator.parameter_server_step(batch, learning_rate, self._staleness)

    def resume_notes(self, strategy_before: str, replicas_before: int, replicas: int) -> list[str]:
        """Notes that stale weights are lost: a checkpoint has the weights with all updates applied."""
        if self._staleness == 0:
            return []
        return [
            f"{self.name}: the stale weights of slices in progress: it continues from the weights with all"
            " their updates applied"
        ]

    def why_not_elastic(self) -> str:
        """Reason why the others cannot go on without the parameter server."""
        return (
            "only the parameter server has the weights and the optimizer state; without elastic, too, the run"
            " goes on when a worker is lost"
        )

    def finished(self, group: ReplicaGroup) -> None:
        """Waits for the slices in progress."""
        group.barrier()

    def report(self) -> Mapping[str, Any]:
        """Measured staleness, slices per worker, and the workers that were lost."""
        if self._group is None or self._group.replicas == 1:
            return {}
        stats = require(self._group, ParameterServerGroup).parameter_server_stats()
        return {"staleness_bound": self._staleness, **stats}

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes of the gradients that a worker sends per step; the weights that it receives do not count."""
        return float(gradient_bytes) if replicas > 1 else 0.0
