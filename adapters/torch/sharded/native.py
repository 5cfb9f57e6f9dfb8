"""A native model of which each replica keeps a part of every weight and slot, over any exchange."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from isotrain.adapters.common import sharding
from isotrain.adapters.torch.base.tensors import TensorOrShard
from isotrain.adapters.torch.comm.base import Communicator
from isotrain.adapters.torch.optim.lamb import Lamb
from isotrain.adapters.torch.sharded.lazy_parameters import LazyParameters
from isotrain.adapters.torch.sharded.trainer import ShardedTrainer
from isotrain.adapters.torch.sharded.weights import ShardedWeights
from isotrain.adapters.torch.trainer.base import LossModule
from isotrain.adapters.torch.trainer.native import NativeTrainer, clip_gradients
from isotrain.plugin import DeviceMesh, TrainingSpec


class ShardedNativeTrainer(ShardedTrainer, NativeTrainer):
    """Computes as a hand-written script would, with weights that are joined as operations take them."""

    def __init__(self, spec: TrainingSpec, model: nn.Module, device: torch.device) -> None:
        super().__init__(spec, model, device)
        self._forward = self._in_parts(self._forward)
        self._compute = self._in_parts(self._compute)
        self.loss_module = LossModule(model, self._compute)

    def _in_parts(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*given: Any) -> Any:
            with self._gather_on_read():
                return compute(*given)

        return computed

    def shard_weights(self, communicator: Communicator, mesh: DeviceMesh, unit_bytes: int) -> None:
        named = self.trainable
        undivided = [name for name, each in named.items() if not each.dim()]
        sharding.require_shardable(undivided, {str(each.dtype)[6:] for each in named.values()})
        sizes = [each.nbytes for each in named.values()]
        units = sharding.fsdp_units(list(named), sizes, unit_bytes, ".")
        self.weights = ShardedWeights(named, units, communicator, mesh)
        self._lazy_parameters = LazyParameters(self.weights)
        self._places = {name: place for place, name in enumerate(named)}
        self._build_optimizer(
            dict(zip(named, map(nn.Parameter, self.weights.local_shards), strict=True))
        )
        if isinstance(self.optimizer, Lamb):
            self.optimizer.norms = self.weights.norms

    def _joining(self, weights: ShardedWeights) -> AbstractContextManager[None]:
        return self._lazy_parameters.forward()

    def backward(self, loss: torch.Tensor) -> None:
        with self._lazy_parameters.backward():
            super().backward(loss)

    def apply(self, norm: torch.Tensor | None = None) -> None:
        """Clips as whole gradients are clipped."""
        if self._clip is not None:
            self._clip_parts(self._clip)
        self._update()

    def _clip_parts(self, clip: Any) -> None:
        if clip.value is not None:
            clip_gradients(self.updated, clip)
            return
        norms = self.sharded_weights.norms([part.grad for part in self.updated])
        if clip.global_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack(norms))
            nn.utils.clip_grads_with_norm_(self.updated, clip.global_norm, norm)
            return
        for part, norm in zip(self.updated, norms, strict=True):
            nn.utils.clip_grads_with_norm_([part], clip.norm, norm)

    def _slots_here(self) -> dict[str, TensorOrShard]:
        return {name: self._slot_here(name, slot) for name, slot in self.optimizer_state().items()}

    def _slot_here(self, name: str, slot: torch.Tensor) -> TensorOrShard:
        place = self._place_of(name)
        if (
            self.weights is None
            or place is None
            or slot.shape != self.weights.local_shards[place].shape
        ):
            return slot
        return self.weights.as_shard(place, slot)

    def _place_of(self, slot: str) -> int | None:
        """Of the weight that a slot is of, if it is of one."""
        return self._places.get(slot.rpartition("/")[0])

    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        place = self._place_of(name)
        if self.weights is not None and place is not None:
            value = self.weights.local_shard_of(place, value)
        super().write_optimizer_slot(name, value)
