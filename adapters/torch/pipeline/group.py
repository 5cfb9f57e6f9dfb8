"""The group of one torch process of a pipeline run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from isotrain.adapters.common.pipeline import profiler as layer_profiler
from isotrain.adapters.common.pipeline.checks import local_weight_indices, require_built
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.tensors import restored_after
from isotrain.adapters.torch.comm.base import all_reduce_mean_flat
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.adapters.torch.pipeline.modules import split_model
from isotrain.adapters.torch.pipeline.stage import PipelineContext, TorchStageWork
from isotrain.adapters.torch.replica.group import TorchReplicaGroup
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
    execute_stage,
)

_WEIGHTS: tuple[StateKind, ...] = ("trainable", "non-trainable")


class PipelineReplicaGroup(TorchReplicaGroup):
    """One stage of one replica, which has all weights and keeps its own up to date."""

    communicator: PipelineCommunicator

    def __init__(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        device: torch.device,
        connect: Callable[[], PipelineCommunicator],
        cut: PipelineSplit,
    ) -> None:
        """Builds the model, joins the others, and keeps the optimizer's slots of its own stage.

        Args:
            spec: What to train.
            backend_config: What the plan resolved.
            device: Where this stage lives.
            connect: Joins the other processes; called once the model is built.
            cut: Of the model.
        """
        self._is_joined = True
        self._taken: list[ExecutedAction] = []
        super().__init__(spec, backend_config, device, connect)
        trainer = self.trainer
        trainer.set_split(True)  # into micro-batches
        late = [metric.name for metric in self._metrics.training if metric.is_unbuilt]
        require_built(late)
        model, loss, self._compare = split_model(trainer, spec, cut)
        self._stages = PipelineContext(model, self.communicator, loss)
        self._stage_of = model.stage_of_weights(self.communicator.stages)
        trainable = list(trainer.trainable.values())
        places = local_weight_indices(self._stage_of, trainable, self.communicator.stage)
        self.shard_optimizer([places])
        self.statistics = [each for each in trainer.statistics if self._is_own(each)]

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return self._stage_of.get(id(tensor), 0) == self.communicator.stage

    @property
    def _is_last(self) -> bool:
        return (
            self.communicator.stage
            == (len(self._stages.model.chunks) - 1) % self.communicator.stages
        )

    def pipeline_step(
        self, batch: Batch, learning_rate: float, actions: Sequence[Sequence[Action]]
    ) -> torch.Tensor:
        self._set_learning_rate(learning_rate)
        self.trainer.zero_gradients()
        micro_batches, stage = batch.slices[0], self.communicator.stage
        if self._is_joined:
            for micro_batch in itertools.islice((each for each in micro_batches if each.count), 1):
                self._compare(micro_batch.inputs)
        self.reshard_weights()
        still = functools.partial(restored_after, self.statistics)
        work = TorchStageWork(self._stages, micro_batches, still, self._metrics.train)
        self._taken = execute_stage(actions[stage], stage, work)
        self.communicator.wait_all_sent()
        self._update_own()
        if self.statistics and self.replicas > 1:
            all_reduce_mean_flat(
                self.communicator,
                self.statistics,
                sum(micro_batch.weight for micro_batch in micro_batches),
            )
        return self.communicator.sum_over_all(work.share) / self.replicas

    def _update_own(self) -> None:
        """Averages this stage's gradients over the replicas, clips them with all others, and applies them."""
        gradients = [each.grad for each in self.trainer.updated if each.grad is not None]
        if self.replicas > 1:
            all_reduce_mean_flat(self.communicator, gradients, 1.0)
        norm = None
        if self._spec.clip is not None and self._spec.clip.global_norm is not None:
            nothing = torch.zeros_like(self.trainer.updated[0].flatten()[0])
            norms = torch.stack([nothing, *private_api.foreach_norm(gradients)])
            norm = self.communicator.sum_over_stages(torch.linalg.vector_norm(norms) ** 2).sqrt()
        self._snapshot_guard.wait_after_forward()
        self.trainer.apply(norm)

    def refuses_single_sample(self, batch: Batch) -> str | None:
        return super().refuses_single_sample(batch) if self._is_joined else None

    def gather_stages(self) -> None:
        if self._is_joined:
            return
        with torch.no_grad():
            for tensor in self._weights().values():
                if not tensor.untyped_storage().nbytes():
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                self.communicator.broadcast_from_stage(tensor, self._stage_of.get(id(tensor), 0))
        self._is_joined = True

    def reshard_weights(self) -> None:
        if self._is_joined:
            self._is_joined = False
            self._snapshot_guard.release()
            self._drop_other_stages()

    def last_actions(self) -> Sequence[ExecutedAction]:
        return self._taken

    def profile_layers(self, batch: Batch) -> ModelProfile:
        model = self._stages.model
        given = model.inputs(batch.slices[0][0].inputs)
        return layer_profiler.profile_calls(model.layer_calls(), given, self._passes)

    def _passes(
        self, compute: layer_profiler.Compute, given: Sequence[torch.Tensor], trained: Sequence[Any]
    ) -> tuple[Callable[[], list[torch.Tensor]], Callable[[], None]]:
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in given]

        def forward() -> list[torch.Tensor]:
            found = [each.detach() for each in compute(*leaves)]
            self.synchronize_device()
            return found

        def both() -> None:
            roots = [each for each in compute(*leaves) if each.requires_grad]
            if roots:
                torch.autograd.grad(
                    roots, [*leaves, *trained], list(map(torch.ones_like, roots)), allow_unused=True
                )
            self.synchronize_device()

        return forward, both

    def plan_notes(self) -> list[str]:
        return super().plan_notes() + self._stages.model.describe(self.communicator.stages)

    def evaluation_step(self, batch: Batch) -> None:
        if self._is_last:
            super().evaluation_step(batch)

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.communicator.sum_over_all(tensor)

    @property
    def is_single_process(self) -> bool:
        return self.replicas * self.communicator.stages == 1

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        found = self.communicator.max_over_all(self.tensor(np.array(numbers, np.float64)))
        return [float(number) for number in self.numpy(found)]

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        found = super().describe_state(kinds, replica=replica)
        if self._is_joined:
            return found
        weights = self._weights()
        return {
            name: info.on_this_replica_only() if name in weights else info
            for name, info in found.items()
        }

    def is_remote(self, name: str) -> bool:
        """Also of a weight of another stage, unless all have been joined."""
        weight = self.trainer.trainable.get(name, self.trainer.frozen.get(name))
        moved = not self._is_joined and weight is not None and not self._is_own(weight)
        return moved or super().is_remote(name)

    def _sections(self) -> dict[StateKind, Section]:
        """As of one replica; between steps, the weights of this stage alone."""
        whole = super()._sections()
        return whole | {
            kind: Section(functools.partial(self._read_here, whole[kind]), whole[kind].write)
            for kind in _WEIGHTS
        }

    def _read_here(self, section: Section) -> dict[str, torch.Tensor]:
        here = self._here()
        return {name: tensor for name, tensor in section.read().items() if name in here}

    def _here(self) -> dict[str, torch.Tensor]:
        """The weights that this process has as they are now."""
        weights = self._weights()
        if self._is_joined:
            return weights
        return {name: tensor for name, tensor in weights.items() if self._is_own(tensor)}

    def _local_frozen(self) -> list[torch.Tensor]:
        return [tensor for name, tensor in self._here().items() if name in self.trainer.frozen]

    def _weights(self) -> dict[str, torch.Tensor]:
        return {**self.trainer.trainable, **self.trainer.frozen}

    def _drop_other_stages(self) -> None:
        """Gives the memory of other stages' weights back; `gather_stages` gets them again."""
        for tensor in self._weights().values():
            if self._is_own(tensor):
                continue
            if not tensor.untyped_storage().resizable():  # the memory is NumPy's
                tensor.data = torch.empty_like(tensor)
            tensor.untyped_storage().resize_(0)
