"""Replica group of one torch process of a fully sharded run, over any communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.torch.base.gpu import replica_device
from isotrain.adapters.torch.comm.base import Communicator, all_reduce_mean_flat
from isotrain.adapters.torch.replica.gradient_buckets import BucketedGradients
from isotrain.adapters.torch.replica.loss_weighting import SliceWeights
from isotrain.adapters.torch.replica.replica_group import TorchReplicaGroup
from isotrain.adapters.torch.sharded.native import ShardedNativeTrainer
from isotrain.adapters.torch.sharded.trainer import ShardedTrainer
from isotrain.adapters.torch.sharded.weights import ShardedWeights
from isotrain.adapters.torch.trainer.build import build_frozen, build_model
from isotrain.plugin import BackendConfig, Batch, ProcessContext, SpecError, TrainingSpec


class ShardedReplicaGroup(TorchReplicaGroup):
    """Replica group that has a shard of every weight and optimizer state between steps (ZeRO stage 3)."""

    trainer: ShardedTrainer

    def __init__(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        connect: Callable[[], Communicator],
        unit_bytes: int,
    ) -> None:
        """Builds the model, connects to the other replicas, and shards the weights. Collective.

        Args:
            spec: Training spec.
            backend_config: Backend configuration of the plan.
            context: Context of this process.
            connect: Makes the communicator; called once the model is built.
            unit_bytes: Size (bytes) of the weights that are gathered together, as far as layer borders allow.
        """
        super().__init__(spec, backend_config, replica_device(backend_config, context), connect)
        self.trainer.shard_weights(self.communicator, context.device_mesh, unit_bytes)
        self._rate = None

    def _build(self, spec: TrainingSpec, device: torch.device) -> ShardedTrainer:
        return build_sharded(spec, device)

    @property
    def _weights(self) -> ShardedWeights:
        return self.trainer.sharded_weights

    def synchronous_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        """Accumulates unsharded gradients; reduce-scatters them in the last micro-batch's backward pass.

        Returns the mean loss, a scalar. Collective.
        """
        self.reshard_weights()
        trainer, weights = self.trainer, self._weights
        trainer.step.set_batch(batch)
        bucketed = BucketedGradients(trainer, self._replica, weights.reduction)
        slice_weights = SliceWeights(batch.slices[0], trainer, self.communicator)
        trainer.zero_gradients()
        share: torch.Tensor | None = None
        last = len(slice_weights.micro_batches) - 1
        for index in range(last + 1):
            with bucketed.during_backward() if index == last else nullcontext():
                share = self._backward(slice_weights, index, trainer.loss_module.forward, share)
        weights.free_gathered()
        assert share is not None
        mean = self.communicator.all_reduce_mean_async(share)
        self.update_shard([weights.in_weight_order(bucketed.reduced)], learning_rate, None)
        if self.statistics:
            all_reduce_mean_flat(self.communicator, self.statistics, slice_weights.weight)
        return mean()

    def part_sums(self, batch: Batch) -> Iterator[list[list[torch.Tensor]]]:
        """As of a group whose weights are whole: they are gathered once, for all parts. Collective.

        Replicas may have different numbers of parts, between which they exchange nothing; and gradients of
        parts are whole too, and more than the weights.
        """
        self.unshard_weights()
        yield from super().part_sums(batch)

    def apply_gradients(
        self, gradients: Sequence[Sequence[torch.Tensor]], learning_rate: float
    ) -> None:
        """Updates this replica's shards, with the bits of an update of whole weights. Local."""
        self.reshard_weights()
        weights, whole = self._weights, gradients[0]
        shards = [
            weights.local_shard_of(index, each).clone(memory_format=torch.contiguous_format)
            for index, each in enumerate(whole)
        ]
        with weights.norms_of(whole):
            self.update_shard([shards], learning_rate, None)

    def reshard_weights(self) -> None:
        if self._weights.is_unsharded:
            self._snapshot_guard.release()
            self._weights.reshard()

    def unshard_weights(self) -> None:
        self._weights.unshard()

    def keep_gradients(self) -> bool:
        return False


def build_sharded(spec: TrainingSpec, device: torch.device) -> ShardedTrainer:
    """Builds the spec's model on this process's device; its weights are not sharded yet.

    Raises:
        SpecError: The model function returned neither a Keras model nor, for a model of torch, a module.
    """
    frozen = build_frozen(spec, device)
    model = build_model(spec)
    if keras_backend.is_keras_instance(model, "Layer"):
        from isotrain.adapters.torch.sharded.keras import ShardedKerasTrainer

        return ShardedKerasTrainer(spec, model, frozen)
    if isinstance(model, nn.Module) and isinstance(spec.model, Mapping):
        return ShardedNativeTrainer(spec, model, device, frozen)
    raise SpecError(
        f"model: the function returned {type(model).__name__!r}; with stage=3, strategy sharded takes Keras"
        " models, and native torch modules that the spec declares as such: `model: {torch: ...}`."
    )
