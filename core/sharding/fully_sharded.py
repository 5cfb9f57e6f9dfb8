"""The parallel layout of fully sharded runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.core.contracts.placement import REPLICATED, ParallelLayout
from isotrain.core.sharding.hybrid import Hybrid
from isotrain.core.sharding.placement import AnyShardedLayout

if TYPE_CHECKING:
    from isotrain.core.contracts.adapter import Adapter
    from isotrain.core.contracts.group import ReplicaGroup
    from isotrain.core.contracts.plan import BackendConfig
    from isotrain.core.contracts.process import ProcessContext
    from isotrain.core.contracts.service import ServerConnection
    from isotrain.core.spec.training_spec import TrainingSpec


class FullyShardedLayout(AnyShardedLayout):
    """Every replica steps, and holds a part of each weight, of its gradient and of its slots."""

    name = "fully-sharded"

    def __init__(self, unit_bytes: int, hybrid: Hybrid | None = None) -> None:
        """Says how much is whole at once, and over whom the parts lie.

        Args:
            unit_bytes: Of weights that are joined together, where the model's modules allow it.
            hybrid: Over the replicas of each host; None: over all.
        """
        super().__init__(hybrid)
        self._unit_bytes = unit_bytes

    def for_replicas(self, replicas: int) -> ParallelLayout:
        """A single replica has all."""
        return self if replicas > 1 else REPLICATED

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        server_connection: ServerConnection | None = None,
    ) -> ReplicaGroup:
        """Joins the run with a part of the state."""
        return adapter.start_fully_sharded(spec, backend_config, context, self._unit_bytes)
