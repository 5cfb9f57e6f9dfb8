"""Trainer of a fully sharded native model, over any communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from isotrain.adapters.common import weight_sharding
from isotrain.adapters.torch.base.tensors import TensorOrShard
from isotrain.adapters.torch.comm.base import Communicator
from isotrain.adapters.torch.optim.lamb import Lamb
from isotrain.adapters.torch.optim.native import clip_shards
from isotrain.adapters.torch.sharded.lazy_parameters import LazyParameters
from isotrain.adapters.torch.sharded.trainer import ShardedTrainer
from isotrain.adapters.torch.sharded.weights import ShardedWeights
from isotrain.adapters.torch.trainer.base import LossModule
from isotrain.adapters.torch.trainer.native import NativeTrainer
from isotrain.plugin import DeviceMesh, TrainingSpec


class ShardedNativeTrainer(ShardedTrainer, NativeTrainer):
    """Trainer of a torch module whose sharded weights are gathered as operations take them."""

    def __init__(
        self,
        spec: TrainingSpec,
        model: nn.Module,
        device: torch.device,
        frozen: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__(spec, model, device, frozen)
        self._forward = self._with_gathering(self._forward)
        self._compute = self._with_gathering(self._compute)
        self.loss_module = LossModule(model, self._compute)

    def _with_gathering(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_gathered(*args: Any) -> Any:
            with self._gather_on_read():
                return compute(*args)

        return compute_gathered

    def shard_weights(self, communicator: Communicator, mesh: DeviceMesh, unit_bytes: int) -> None:
        weights = self.trainable
        scalars = [name for name, each in weights.items() if not each.dim()]
        weight_sharding.require_shardable(
            scalars, {str(each.dtype)[6:] for each in weights.values()}
        )
        sizes = [each.nbytes for each in weights.values()]
        units = weight_sharding.fsdp_units(list(weights), sizes, unit_bytes, ".")
        self.weights = ShardedWeights(weights, units, communicator, mesh)
        self._lazy_parameters = LazyParameters(self.weights)
        self._indices = {name: index for index, name in enumerate(weights)}
        self._build_optimizer(
            dict(zip(weights, map(nn.Parameter, self.weights.local_shards), strict=True))
        )
        if isinstance(self.optimizer, Lamb):
            self.optimizer.norms = self.weights.norms

    def _gathering(self, weights: ShardedWeights) -> AbstractContextManager[None]:
        return self._lazy_parameters.forward()

    def backward(self, loss: torch.Tensor) -> None:
        with self._lazy_parameters.backward():
            super().backward(loss)

    def apply(self, norm: torch.Tensor | None = None) -> None:
        """Clips by the scalar norms of the unsharded gradients, and updates this replica's shards."""
        if self._clip is not None:
            clip_shards(self.updated, self._clip, self.sharded_weights.norms)
        self._update()

    def _local_slots(self) -> dict[str, TensorOrShard]:
        return {name: self._local_slot(name, slot) for name, slot in self.optimizer_state().items()}

    def _local_slot(self, name: str, slot: torch.Tensor) -> TensorOrShard:
        """This replica's shard of a sharded weight's slot, in its local shape; other tensors as they are."""
        index = self._index_of(name)
        if (
            self.weights is None
            or index is None
            or slot.shape != self.weights.local_shards[index].shape
        ):
            return slot
        return self.weights.as_shard(index, slot)

    def _index_of(self, slot: str) -> int | None:
        """Index of the weight that an optimizer state tensor belongs to; None for a global one."""
        return self._indices.get(slot.rpartition("/")[0])

    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        index = self._index_of(name)
        if self.weights is not None and index is not None:
            value = self.weights.local_shard_of(index, value)
        super().write_optimizer_slot(name, value)
