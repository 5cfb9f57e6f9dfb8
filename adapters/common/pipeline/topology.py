"""Processes of a replica that is in several of them; imports no framework."""

from __future__ import annotations

from isotrain.plugin import DATA, STAGE, ProcessContext


class ReplicaTopology:
    """The processes of a replica, as one of them sees them. Processes have indices in the replica.

    Attributes:
        process: Index of this process.
        processes: Number of processes of the replica.
        stage: Stage of this process; 0 in tensor-parallel runs.
        stages: Number of stages.
        copy: Index of this process among those of its stage in this replica.
        shares_stage: Whether this replica has several processes with this stage.
        copies: Number of processes with this stage, or part, in all replicas.
        first_rank: Rank of the first process of the replica.
    """

    def __init__(self, context: ProcessContext) -> None:
        """Reads the device mesh.

        Args:
            context: Rank and device mesh of this process.
        """
        mesh, rank = context.device_mesh, context.rank
        self.process = mesh.index_in_group(rank, mesh.replica_axis)
        self.processes = mesh.positions_per_replica
        self.first_rank = rank - self.process
        self.stages = mesh.size(STAGE)
        self._stage_of = [
            mesh.coordinates(self.first_rank + process).get(STAGE, 0)
            for process in range(self.processes)
        ]
        self.stage = self._stage_of[self.process]
        self.copy = self.process - self.first_of(self.stage) if STAGE in mesh.sizes else 0
        self.shares_stage = STAGE in mesh.sizes and self._stage_of.count(self.stage) > 1
        self.copies = next(len(group) for group in mesh.groups(DATA) if rank in group)

    def first_of(self, stage: int) -> int:
        """Index of the first process of a stage."""
        return self._stage_of.index(stage)

    def evaluates(self, chunks: int) -> bool:
        """Whether this process is the first with the last of the model's chunks, so many in all."""
        return self.process == self.first_of((chunks - 1) % self.stages)
