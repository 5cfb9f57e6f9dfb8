"""Replica group of one torch process of a pipeline run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from isotrain.adapters.common.pipeline.checks import local_weight_indices, require_built
from isotrain.adapters.common.pipeline.delayed_updates import (
    ContinuedPasses,
    WeightVersions,
)
from isotrain.adapters.common.pipeline.stage_group import StageGroup
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.without_values import WithoutValues
from isotrain.adapters.torch.comm.base import all_reduce_mean_flat
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.adapters.torch.pipeline.delayed_updates import (
    ContinuedStageWork,
    TorchWeightVersions,
)
from isotrain.adapters.torch.pipeline.layer_profiler import LayerProfiler
from isotrain.adapters.torch.pipeline.modules import split_model
from isotrain.adapters.torch.pipeline.stage import PipelineContext, StageSeeds, TorchStageWork
from isotrain.adapters.torch.replica.replica_group import TorchReplicaGroup
from isotrain.adapters.torch.trainer.state import Section
from isotrain.plugin import (
    MODEL_STATE,
    Action,
    BackendConfig,
    Batch,
    ExecutedAction,
    ModelProfile,
    PipelineSplit,
    StateInfo,
    StateKind,
    TrainingSpec,
)

_WEIGHTS: tuple[StateKind, ...] = ("trainable", "non-trainable")


class PipelineReplicaGroup(StageGroup, TorchReplicaGroup):
    """Replica group of one stage: it trains the stage's weights, and has those of others on request."""

    communicator: PipelineCommunicator
    _without_values = WithoutValues
    _is_gathered = True

    def __init__(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        device: torch.device,
        connect: Callable[[], PipelineCommunicator],
        split: PipelineSplit,
    ) -> None:
        """Builds the model, connects to the other processes, and drops other stages' optimizer state.

        Collective over all processes.

        Args:
            spec: Training spec.
            backend_config: Backend configuration of the plan.
            device: Device of this stage.
            connect: Makes the communicator; called once the model is built.
            split: Split of the model into chunks.
        """
        super().__init__(spec, backend_config, device, connect)
        trainer = self.trainer
        trainer.set_split(True)  # into micro-batches
        unbuilt = [metric.name for metric in self._metrics.training if metric.is_unbuilt]
        require_built(unbuilt)
        model, loss, self._check_equivalence = split_model(trainer, spec, split)
        self._topology = self.communicator.topology
        self._stage_of = model.stage_of_weights(self._topology.stages)
        self._trainable = trainer.trainable
        trainable = list(self._trainable.values())
        indices = local_weight_indices(self._stage_of, trainable, self._topology.stage)
        self.shard_optimizer([indices])
        self.statistics = [each for each in trainer.statistics if self._is_local(each)]
        seeds = model.seeds(self._topology.stage) if self._topology.shares_stage else ()
        self._context = PipelineContext(
            model,
            self.communicator,
            loss,
            [each for each in trainable if self._is_local(each)],
            self.statistics,
            StageSeeds(seeds),
        )
        if self._topology.copy:  # processes with the same stage draw different numbers
            torch.manual_seed(torch.initial_seed() + self.replicas * self._topology.copy)

    @property
    def _has_all_weights(self) -> bool:
        return self._is_gathered

    def _is_local(self, tensor: torch.Tensor) -> bool:
        """Whether a weight, of any shape, belongs to this stage."""
        return self._stage_of.get(id(tensor), 0) == self._topology.stage

    def pipeline_step(
        self, batch: Batch, learning_rate: float, actions: Sequence[Sequence[Action]]
    ) -> torch.Tensor:
        self._set_rate(learning_rate)
        self.trainer.zero_gradients()
        micro_batches = batch.slices[0]
        self._begin_passes(micro_batches)
        work = TorchStageWork(self._context, micro_batches, self._metrics.train)
        self._execute(actions, work)
        self._context.seeds.move_to(len(micro_batches))
        self.communicator.wait_all_sent()
        self._update_stage()
        self._average_statistics(self._weight_of(micro_batches, actions))
        return self._mean_loss(work.share)

    def _average_statistics(self, weight: float) -> None:
        if self.statistics and self._topology.copies > 1:
            all_reduce_mean_flat(self.communicator, self.statistics, weight)

    def _mean_loss(self, share: torch.Tensor) -> torch.Tensor:
        return self.communicator.sum_over_all(share) / self.replicas

    def _continued(
        self, weights: Mapping[str, torch.Tensor], delay: int, layout: str
    ) -> tuple[ContinuedPasses, WeightVersions]:
        passes = ContinuedStageWork(self._context, list(weights.values()), self._metrics.train)
        return passes, TorchWeightVersions(weights, delay, layout)

    def _delayed_update(self, is_late: bool, weight: float | None) -> None:
        self._rates.apply(is_late)
        if weight is None:
            self._update_stage()
        else:
            self._update_by_samples(weight)

    def _update_by_samples(self, weight: float) -> None:
        """Averages this stage's gradients over the samples of all its processes, and applies them.

        Nothing is applied where these have no samples.

        Args:
            weight: Weight of the micro-batch that the gradients here are of.
        """
        gradients = [each.grad for each in self.trainer.updated if each.grad is not None]
        if self._topology.copies > 1:
            like = self.trainer.updated[0]
            dtype = torch.promote_types(like.dtype, torch.float32)
            total = torch.tensor(weight, dtype=dtype, device=like.device)
            all_reduce_mean_flat(self.communicator, [*gradients, total], 1.0)
            weight = float(total)
        if weight:
            private_api.foreach_mul_(gradients, 1 / weight)
            self._snapshot_guard.wait_after_forward()
            self.trainer.apply()

    def _update_stage(self) -> None:
        """Averages this stage's gradients over replicas, clips by the norm of all stages, applies them."""
        gradients = [each.grad for each in self.trainer.updated if each.grad is not None]
        if self._topology.copies > 1:
            all_reduce_mean_flat(self.communicator, gradients, 1.0)
        norm = self._norm_to_clip_by(self.trainer.updated)
        if norm is not None:
            square = norm**2
            if self._topology.copy:  # the first process with this stage adds it
                square = torch.zeros_like(square)
            norm = self.communicator.sum_in_replica(square).sqrt()
        self._snapshot_guard.wait_after_forward()
        self.trainer.apply(norm)

    def _norm_to_clip_by(self, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Global norm of the gradients of weights, any shapes, a scalar; None unless the spec clips by it."""
        if self._spec.clip is None or self._spec.clip.global_norm is None:
            return None
        zero = torch.zeros_like(weights[0].flatten()[0])
        gradients = [each.grad for each in weights if each.grad is not None]
        norms = torch.stack([zero, *private_api.foreach_norm(gradients)])
        return torch.linalg.vector_norm(norms)

    def refuses_single_sample(self, batch: Batch) -> str | None:
        return super().refuses_single_sample(batch) if self._has_all_weights else None

    def gather_stages(self) -> None:
        self.drain_pipeline()
        if self._has_all_weights:
            return
        with torch.no_grad():
            for tensor in self._all_weights().values():
                if not tensor.untyped_storage().nbytes():
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                source = self._topology.first_of(self._stage_of.get(id(tensor), 0))
                self.communicator.broadcast_in_replica(tensor, source)
        self._is_gathered = True

    def _reshard(self) -> None:
        if self._has_all_weights:
            self._is_gathered = False
            self._snapshot_guard.release()
            self._drop_other_stages()

    def set_action_timing(self, enabled: bool) -> None:
        """Does nothing: every step is timed."""

    def last_actions(self) -> Sequence[ExecutedAction]:
        return self._executed

    def profile_layers(self, batch: Batch) -> ModelProfile:
        profiler = LayerProfiler(
            *(self._context, self.trainer, self._metrics, self._norm_to_clip_by),
            self.synchronize_device,
        )
        micro_batch = batch.slices[0][0]
        # what has no values takes no time
        return (profiler.estimated if self._lacks_values else profiler.measured)(micro_batch)

    def evaluation_step(self, batch: Batch) -> None:
        if self._topology.evaluates(len(self._context.model.chunks)):
            super().evaluation_step(batch)

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.communicator.sum_over_all(tensor)

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        maxima = self.communicator.max_over_all(self.tensor(np.array(numbers, np.float64)))
        return [float(number) for number in self.numpy(maxima)]

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        infos = super().describe_state(kinds, replica=replica)
        if self._has_all_weights:
            return infos
        all_weights = self._all_weights()
        return {
            name: info.on_this_replica_only() if name in all_weights else info
            for name, info in infos.items()
        }

    def is_remote(self, name: str) -> bool:
        """Whether only other processes hold it: also a weight of another stage, unless gathered. Local."""
        weight = self.trainer.trainable.get(name, self.trainer.frozen.get(name))
        is_elsewhere = (
            not self._has_all_weights and weight is not None and not self._is_local(weight)
        )
        return is_elsewhere or super().is_remote(name)

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        self.drain_pipeline()
        if self._versions is None:
            super().write_state(state, replica=replica)
            return
        weights = {name: value for name, value in state.items() if name in self.trainer.trainable}
        super().write_state(weights, replica=replica)
        self._versions.equalize(list(weights))
        others = {name: value for name, value in state.items() if name not in weights}
        super().write_state(others, replica=replica)

    def _execution_state(self) -> dict[str, torch.Tensor]:
        versions = {} if self._versions is None else self._versions.state()
        return super()._execution_state() | versions

    def _write_execution_state(self, name: str, value: torch.Tensor) -> None:
        if self._versions is not None and self._versions.owns(name):
            self._versions.write(name, value)
        else:
            super()._write_execution_state(name, value)

    def _sections(self) -> dict[StateKind, Section]:
        """State by kind; between steps, of the weights only those of this stage."""
        sections = super()._sections()
        return sections | {
            kind: Section(functools.partial(self._read_local, sections[kind]), sections[kind].write)
            for kind in _WEIGHTS
        }

    def _read_local(self, section: Section) -> dict[str, torch.Tensor]:
        """Tensors of a checkpoint section, in their shapes, by name of a local weight."""
        here = self._local_weights()
        return {name: tensor for name, tensor in section.read().items() if name in here}

    def _local_weights(self) -> dict[str, torch.Tensor]:
        """Weights by name, in their shapes, that are up to date in this process."""
        weights = self._all_weights()
        if self._has_all_weights:
            return weights
        return {name: tensor for name, tensor in weights.items() if self._is_local(tensor)}

    def _local_frozen(self) -> list[torch.Tensor]:
        return [
            tensor for name, tensor in self._local_weights().items() if name in self.trainer.frozen
        ]

    def _all_weights(self) -> dict[str, torch.Tensor]:
        """Weights of all stages by name, in their shapes."""
        return {**self.trainer.trainable, **self.trainer.frozen}

    def _drop_other_stages(self) -> None:
        """Frees the memory of other stages' weights; `gather_stages` fetches them again."""
        for tensor in self._all_weights().values():
            if self._is_local(tensor):
                continue
            if not tensor.untyped_storage().resizable():  # NumPy owns the memory
                tensor.data = torch.empty_like(tensor)
            tensor.untyped_storage().resize_(0)
