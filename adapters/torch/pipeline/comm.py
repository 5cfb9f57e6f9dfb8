"""How a torch process of a pipeline run exchanges: along the data axis, and along that of the stages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from isotrain.adapters.torch.base.variable_init import (
    broadcast_bundle,
    broadcast_initial_values,
    dense,
)
from isotrain.adapters.torch.comm.base import Communicator, Wait
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import DATA, STAGE, ProcessContext, Subgroups, UnsupportedError

_AXES = 8
"""Of a tensor that one stage tells another of, at most."""
_TYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.bool),
)


class PipelineCommunicator(Communicator):
    """Ties a stage to the same stage of other replicas, as which it appears, and to its replica's others.

    Attributes:
        stage: This process's.
        stages: How many there are.
    """

    def __init__(self, context: ProcessContext) -> None:
        mesh = context.device_mesh
        self._place = context.rank
        self.rank = mesh.coordinates(context.rank)[DATA]
        self.replicas = mesh.size(DATA)
        self.stage = mesh.coordinates(context.rank)[STAGE]
        self.stages = mesh.size(STAGE)
        self._first = context.rank - self.stage
        self._sent: dict[Hashable, list[Callable[[], None]]] = {}

    def wrap(self, trainer: ReplicaTrainer) -> None:
        self.module = trainer.loss_module.forward
        tensors = trainer.tensors()
        device = next(iter(tensors.values())).device
        broadcast_initial_values(tensors, device, self._send_first)

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def all_reduce_mean_async(self, scalar: torch.Tensor) -> Wait:
        mean = self.all_reduce(scalar, "mean")
        return lambda: mean

    def wait_gradients(self) -> None:
        return

    @abstractmethod
    def _send_first(self, vector: torch.Tensor) -> object:
        """Overwrites bytes by those of rank 0."""

    @abstractmethod
    def sum_over_all(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all stages of all replicas."""

    @abstractmethod
    def max_over_all(self, value: torch.Tensor) -> torch.Tensor:
        """The largest in each place over all stages of all replicas."""

    @abstractmethod
    def sum_over_stages(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the stages of this replica."""

    def broadcast_from_stage(self, tensor: torch.Tensor, stage: int) -> None:
        """Overwrites a tensor by that of another stage of this replica."""
        broadcast_bundle(
            list(dense(tensor.detach())), lambda vector: self._send_from(vector, stage)
        )

    @abstractmethod
    def _send_from(self, vector: torch.Tensor, stage: int) -> None:
        """Overwrites bytes by those of another stage of this replica."""

    @abstractmethod
    def _begin_sending(self, tensor: torch.Tensor, stage: int) -> Callable[[], None]:
        """Begins to send; gives what waits for the end of it, and keeps the tensor till then."""

    @abstractmethod
    def receive(self, like: torch.Tensor, stage: int) -> torch.Tensor:
        """Waits for a tensor like another; those of one stage come as they were sent."""

    def send(self, tensor: torch.Tensor, stage: int, about: Hashable) -> None:
        """Begins to send to another stage of this replica; the tensor is kept until `wait_sent`.

        Args:
            tensor: Goes there.
            stage: The other.
            about: What it is sent for.
        """
        waiting = self._begin_sending(tensor.contiguous(), stage)
        self._sent.setdefault(about, []).append(waiting)

    def send_spec(self, tensor: torch.Tensor, stage: int, about: Hashable) -> None:
        """Tells another stage the shape and type of what follows."""
        axes = [*tensor.shape, *[0] * (_AXES - tensor.dim())]
        told = [_TYPES.index(tensor.dtype), tensor.dim(), *axes]
        self.send(torch.tensor(told, device=tensor.device), stage, about)

    def receive_spec(self, stage: int, device: torch.device) -> torch.Tensor:
        """An empty tensor as what follows is told to be."""
        header = torch.empty(2 + _AXES, dtype=torch.int64, device=device)
        kind, axes, *shape = self.receive(header, stage).tolist()
        return torch.empty(shape[:axes], dtype=_TYPES[kind], device=device)

    def wait_sent(self, about: Hashable) -> None:
        """Returns once what was sent for something has arrived."""
        for wait in self._sent.pop(about, []):
            wait()

    @property
    def pending_sends(self) -> Sequence[Hashable]:
        """For what tensors were sent that are kept because they may not have arrived."""
        return list(self._sent)

    def wait_all_sent(self) -> None:
        """Returns once all that was sent has arrived."""
        for about in self.pending_sends:
            self.wait_sent(about)

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        raise unsupported_collective()

    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        raise unsupported_collective()

    def all_reduce_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        raise unsupported_collective()

    def broadcast_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        raise unsupported_collective()

    def reduce_scatter(
        self, value: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        raise unsupported_collective()

    def all_gather_shards(
        self, value: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        raise unsupported_collective()


def unsupported_collective() -> UnsupportedError:
    """The error for what stages have no use for."""
    return UnsupportedError("stages exchange over their cuts, and all that others do they cannot.")
