"""The placement of pipelines: every replica's model lies in stages on processes of their own."""

from __future__ import annotations

from isotrain.plugin import (
    DATA,
    STAGE,
    Adapter,
    Mesh,
    ModelCut,
    Placement,
    ProcessContext,
    ReplicaGroup,
    Seat,
    Service,
    Setting,
    TrainingSpec,
    UnsupportedError,
)


class Staged(Placement):
    """The stages of a replica are neighbours; all of them have its slice of every global batch."""

    name = "staged"

    def __init__(self, stages: int, cut: ModelCut) -> None:
        """Lays out so many.

        Args:
            stages: Of each replica.
            cut: Of the model.
        """
        self._stages = stages
        self._cut = cut

    def mesh(self, replicas: int) -> Mesh:
        """The stages of a replica vary fastest."""
        return Mesh({DATA: replicas, STAGE: self._stages})

    def seats(self, adapter: Adapter, replicas: int) -> tuple[Seat, ...]:
        """A process for each stage of each replica.

        Raises:
            UnsupportedError: The backend has all replicas in one process.
        """
        if adapter.replicas_per_process == "all":
            raise UnsupportedError(
                f"backend {adapter.name!r} has all replicas in one process, and stages need one each."
            )
        mesh = self.mesh(replicas)
        places = range(mesh.places)
        return tuple(Seat((mesh.coordinates(place)[DATA],)) for place in places)

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        setting: Setting,
        context: ProcessContext,
        service: Service | None = None,
    ) -> ReplicaGroup:
        """Joins the run as a stage of a replica."""
        return adapter.start_staged(spec, setting, context, self._cut)
