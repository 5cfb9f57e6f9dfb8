"""Parallel layout in which several processes share each replica, along one axis of the device mesh."""

from __future__ import annotations

from isotrain.plugin import (
    DATA,
    Adapter,
    DeviceMesh,
    ParallelLayout,
    ProcessInfo,
    UnsupportedError,
)


class SharedReplicaLayout(ParallelLayout):
    """Several processes for each replica, with adjacent ranks and the same slices."""

    def __init__(self, axis: str, size: int, part: str) -> None:
        """Keeps the axis of the device mesh.

        Args:
            axis: Axis along which processes share a replica.
            size: Number of processes of a replica.
            part: What a process has of a replica, for messages.
        """
        self._axis, self._size, self._part = axis, size, part

    def device_mesh(self, replicas: int) -> DeviceMesh:
        """A mesh [replicas, parts of a replica]: the latter varies fastest with the rank."""
        return DeviceMesh({DATA: replicas, self._axis: self._size})

    def processes(self, adapter: Adapter, replicas: int) -> tuple[ProcessInfo, ...]:
        """The processes of each replica.

        Raises:
            UnsupportedError: The backend has all replicas in one process.
        """
        if adapter.replicas_per_process == "all":
            raise UnsupportedError(
                f"backend {adapter.name!r} has all replicas in one process, but each {self._part} needs a"
                " separate process."
            )
        mesh = self.device_mesh(replicas)
        ranks = range(mesh.total_size)
        return tuple(ProcessInfo(rank, replicas=(mesh.coordinates(rank)[DATA],)) for rank in ranks)
