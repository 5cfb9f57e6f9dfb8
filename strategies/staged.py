"""The parallel layout of pipelines: every replica's model lies in stages on processes of their own."""

from __future__ import annotations

from isotrain.plugin import (
    DATA,
    STAGE,
    Adapter,
    DeviceMesh,
    PipelineSplit,
    ParallelLayout,
    ProcessContext,
    ReplicaGroup,
    ProcessRole,
    ServerConnection,
    BackendConfig,
    TrainingSpec,
    UnsupportedError,
)


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
