"""Replica group of one torch process of a tensor-parallel run, over any communicator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.torch.comm.base import Wait, all_reduce_mean_flat
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.adapters.torch.replica.replica_group import TorchReplicaGroup
from isotrain.adapters.torch.tensor_parallel.trainer import TensorParallelTrainer
from isotrain.adapters.torch.trainer.build import build_frozen, build_model
from isotrain.plugin import BackendConfig, Batch, Computation, TrainingSpec


class TensorParallelReplicaGroup(TorchReplicaGroup):
    """Replica group of one part of a replica, which has parts of some weights and all of the others."""

    trainer: TensorParallelTrainer
    communicator: PipelineCommunicator

    def __init__(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        device: torch.device,
        connect: Callable[[], PipelineCommunicator],
        layers: Sequence[str] | Mapping[str, str],
    ) -> None:
        """Builds the model, connects to the other processes, and cuts layers. Collective.

        Args:
            spec: Training spec.
            backend_config: Backend configuration of the plan.
            device: Device of this process.
            connect: Makes the communicator; called once the model is built.
            layers: The layers to cut, as `TensorParallelBackend.start_tensor_parallel` gets them.
        """
        super().__init__(spec, backend_config, device, connect)
        self.trainer.cut(self.communicator, layers)
        self._rate = None

    def _build(self, spec: TrainingSpec, device: torch.device) -> TensorParallelTrainer:
        frozen = build_frozen(spec, device)
        model = build_model(spec)
        if isinstance(model, nn.Module) and not keras_backend.is_keras_instance(model, "Layer"):
            from isotrain.adapters.torch.tensor_parallel.native import NativeTensorParallelTrainer

            return NativeTensorParallelTrainer(spec, model, device, frozen)
        from isotrain.adapters.keras.tensor_parallel.cuts import require_portable
        from isotrain.adapters.torch.tensor_parallel.keras import KerasTensorParallelTrainer

        return KerasTensorParallelTrainer(spec, require_portable(model), frozen)

    def synchronous_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        self._check_cuts(batch)
        self.reshard_weights()
        return super().synchronous_step(batch, learning_rate)

    def evaluation_step(self, batch: Batch) -> None:
        self._check_cuts(batch)
        super().evaluation_step(batch)

    def _check_cuts(self, batch: Batch) -> None:
        """Checks the cuts on the first micro-batch with samples, which the parts have in common."""
        for micro_batch in batch.slices[0]:
            if micro_batch.count:
                self.trainer.check_cuts(micro_batch.inputs)
                break

    def _reduced_gradients(self, batch: Batch) -> tuple[Wait, float]:
        """Computes gradients into `.grad`, averaged over the same part of all replicas. Collective."""
        mean, weight = super()._reduced_gradients(batch)
        if self.replicas > 1:
            gradients = [each.grad for each in self.trainer.updated if each.grad is not None]
            all_reduce_mean_flat(self.communicator, gradients, 1.0)
        return mean, weight

    def _keep_requested(self) -> torch.Tensor | None:
        """Measures the norms of the gradients in `.grad`, if requested. Collective."""
        if self._norm_parts is None:
            return None
        updated = self.trainer.updated
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in updated]
        norms = self.trainer.norms(gradients)
        norm_of = {id(weight): norm for weight, norm in zip(updated, norms, strict=True)}
        self._gradient_norms = [
            torch.linalg.vector_norm(torch.stack([norm_of[id(weight)] for weight in part]))
            for part in (updated, *self._norm_parts)
        ]
        return None

    def keep_gradients(self) -> bool:
        return False

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        results = super().compute(computation, *values, static=static)
        if self.trainer.is_gathered:  # it may have changed weights
            self.trainer.gather()
        return results

    def unshard_weights(self) -> None:
        if not self.trainer.is_gathered:
            self.trainer.gather()

    def reshard_weights(self) -> None:
        self.trainer.forget_gathered()

    def plan_notes(self) -> list[str]:
        return [*super().plan_notes(), *self.trainer.cut_notes]

    def _sum_of_step(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.communicator.all_reduce(tensor, "sum")

    @property
    def is_single_process(self) -> bool:
        return False

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        maxima = self.communicator.max_over_all(self.tensor(np.array(numbers, np.float64)))
        return [float(number) for number in self.numpy(maxima)]
