"""Replica group of one torch process of a pipeline run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from isotrain.adapters.common.pipeline import profiler as layer_profiler
from isotrain.adapters.common.pipeline.checks import local_weight_indices, require_built
from isotrain.adapters.common.pipeline.delayed_updates import (
    OverlappedStageWork,
    Rates,
    layout_of_versions,
    overlapped_work,
)
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.pass_costs import costs_of
from isotrain.adapters.torch.base.without_values import WithoutValues
from isotrain.adapters.torch.comm.base import all_reduce_mean_flat
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.adapters.torch.pipeline.delayed_updates import (
    ContinuedStageWork,
    TorchWeightVersions,
)
from isotrain.adapters.torch.pipeline.modules import split_model
from isotrain.adapters.torch.pipeline.stage import PipelineContext, StageSeeds, TorchStageWork
from isotrain.adapters.torch.replica.replica_group import TorchReplicaGroup
from isotrain.adapters.torch.trainer.state import Section
from isotrain.plugin import (
    MODEL_STATE,
    Action,
    BackendConfig,
    Batch,
    DelayedUpdates,
    ExecutedAction,
    ModelProfile,
    PipelineSplit,
    Slice,
    StageWork,
    StateInfo,
    StateKind,
    TrainingSpec,
    execute_stage,
)

_WEIGHTS: tuple[StateKind, ...] = ("trainable", "non-trainable")


_ESTIMATED = (
    "pipeline: without values its layers are not timed: stages are balanced by the operations and bytes of"
    " their layers, and the times are estimates for a GPU. A run that has values times them, and may cut"
    " elsewhere: the option cut fixes it"
)


class PipelineReplicaGroup(TorchReplicaGroup):
    """Replica group of one stage: it trains the stage's weights, and has those of others on request."""

    communicator: PipelineCommunicator

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
        self._has_all_stages = True
        self._executed: list[ExecutedAction] = []
        self._updates: DelayedUpdates | None = None
        self._versions: TorchWeightVersions | None = None
        self._delayed_passes: ContinuedStageWork | None = None
        self._delayed_work: OverlappedStageWork | None = None
        self._rates = Rates()
        super().__init__(spec, backend_config, device, connect)
        trainer = self.trainer
        trainer.set_split(True)  # into micro-batches
        unbuilt = [metric.name for metric in self._metrics.training if metric.is_unbuilt]
        require_built(unbuilt)
        model, loss, self._check_equivalence = split_model(trainer, spec, split)
        self._topology = self.communicator.topology
        self._stage_of = model.stage_of_weights(self._topology.stages)
        trainable = list(trainer.trainable.values())
        indices = local_weight_indices(self._stage_of, trainable, self._topology.stage)
        self.shard_optimizer([indices])
        self.statistics = [each for each in trainer.statistics if self._is_local(each)]
        seeds = model.seeds(self._topology.stage) if self._topology.shares_stage else ()
        self._context = PipelineContext(
            model,
            self.communicator,
            loss,
            self.statistics,
            StageSeeds(seeds),
        )
        if self._topology.copy:  # processes with the same stage draw different numbers
            torch.manual_seed(torch.initial_seed() + self.replicas * self._topology.copy)

    def _is_local(self, tensor: torch.Tensor) -> bool:
        """Whether a weight, of any shape, belongs to this stage."""
        return self._stage_of.get(id(tensor), 0) == self._topology.stage

    def pipeline_step(
        self, batch: Batch, learning_rate: float, actions: Sequence[Sequence[Action]]
    ) -> torch.Tensor:
        self._set_learning_rate(learning_rate)
        self.trainer.zero_gradients()
        micro_batches = batch.slices[0]
        self._begin_passes(micro_batches)
        work = TorchStageWork(self._context, micro_batches, self._metrics.train)
        self._execute(actions, work)
        self._context.seeds.move_to(len(micro_batches))
        self.communicator.wait_all_sent()
        self._update_stage()
        self._average_statistics(micro_batches, actions)
        return self.communicator.sum_over_all(work.share) / self.replicas

    def _begin_passes(self, micro_batches: Sequence[Slice]) -> None:
        """Drops other stages' weights; before, checks once that the stages are the model."""
        if self._has_all_stages:
            for micro_batch in itertools.islice((each for each in micro_batches if each.count), 1):
                self._check_equivalence(micro_batch.inputs)
        self._reshard()

    def _execute(self, actions: Sequence[Sequence[Action]], work: StageWork) -> None:
        process = self._topology.process
        self._executed = execute_stage(actions[process], process, work)

    def _average_statistics(
        self, micro_batches: Sequence[Slice], actions: Sequence[Sequence[Action]]
    ) -> None:
        """Averages moving statistics over the processes of this stage, by the samples that each had."""
        if self.statistics and self._topology.copies > 1:
            own = {action.micro_batch for action in actions[self._topology.process]}
            weight = sum(micro_batches[index].weight for index in sorted(own) if index >= 0)
            all_reduce_mean_flat(self.communicator, self.statistics, weight)

    def start_delayed_updates(self, updates: DelayedUpdates) -> None:
        local = {n: each for n, each in self.trainer.trainable.items() if self._is_local(each)}
        stage_of = {n: self._stage_of.get(id(w), 0) for n, w in self.trainer.trainable.items()}
        stage = self._topology.stage
        delay, layout = updates.versions[stage].delay, layout_of_versions(updates, stage_of)
        self._updates = updates
        self._versions = TorchWeightVersions(local, delay, layout)
        self._delayed_passes = ContinuedStageWork(
            self._context, list(local.values()), self._metrics.train
        )
        self._delayed_work = overlapped_work(
            updates, stage, self._delayed_passes, self._versions, self._delayed_update
        )
        self._rates.delay()

    def delayed_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        assert self._updates is not None
        assert self._delayed_passes is not None
        assert self._delayed_work is not None
        micro_batches, work = batch.slices[0], self._delayed_work
        actions = self._updates.steady if work.has_passes_left else self._updates.fill
        self._begin_passes(micro_batches)
        self._rates.set(self._set_learning_rate, learning_rate)
        work.begin_step(batch)
        self._execute(actions, work)
        self._context.seeds.move_to(len(micro_batches))
        work.end_step()
        self._rates.end_step()
        self._average_statistics(micro_batches, actions)
        loss = self.communicator.sum_over_all(self._delayed_passes.share) / self.replicas
        self._delayed_passes.release_sent()
        return loss

    def drain_pipeline(self) -> None:
        work = self._delayed_work
        if self._updates is None or work is None or not work.has_passes_left:
            return
        work.begin_step(None)
        self._execute(self._updates.drain, work)
        self.communicator.wait_all_sent()
        work.end_step()

    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        self._rates.set(super().set_group_rates, rates)

    def momentum_setter(self) -> Callable[[float], None] | None:
        set_momentum = super().momentum_setter()
        return None if set_momentum is None else functools.partial(self._rates.set, set_momentum)

    def _delayed_update(self, is_late: bool, weight: float | None) -> None:
        """Updates this stage at the rates of the gradients' step; see `Update`. Collective."""
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
        norm = None
        if self._spec.clip is not None and self._spec.clip.global_norm is not None:
            zero = torch.zeros_like(self.trainer.updated[0].flatten()[0])
            norms = torch.stack([zero, *private_api.foreach_norm(gradients)])
            square = torch.linalg.vector_norm(norms) ** 2
            if self._topology.copy:  # the first process with this stage adds it
                square = torch.zeros_like(square)
            norm = self.communicator.sum_in_replica(square).sqrt()
        self._snapshot_guard.wait_after_forward()
        self.trainer.apply(norm)

    def refuses_single_sample(self, batch: Batch) -> str | None:
        return super().refuses_single_sample(batch) if self._has_all_stages else None

    def gather_stages(self) -> None:
        self.drain_pipeline()
        if self._has_all_stages:
            return
        with torch.no_grad():
            for tensor in self._all_weights().values():
                if not tensor.untyped_storage().nbytes():
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                source = self._topology.first_of(self._stage_of.get(id(tensor), 0))
                self.communicator.broadcast_in_replica(tensor, source)
        self._has_all_stages = True

    def reshard_weights(self) -> None:
        self.drain_pipeline()
        self._reshard()

    def _reshard(self) -> None:
        if self._has_all_stages:
            self._has_all_stages = False
            self._snapshot_guard.release()
            self._drop_other_stages()

    def set_action_timing(self, enabled: bool) -> None:
        """Does nothing: every step is timed."""

    def last_actions(self) -> Sequence[ExecutedAction]:
        return self._executed

    def profile_layers(self, batch: Batch) -> ModelProfile:
        model = self._context.model
        inputs = model.inputs(batch.slices[0][0].inputs)
        measure = costs_of if self._lacks_values else None  # which take no time
        return layer_profiler.profile_calls(model.layer_calls(), inputs, self._passes, measure)

    def _passes(
        self,
        compute: layer_profiler.Compute,
        inputs: Sequence[torch.Tensor],
        trained: Sequence[Any],
    ) -> tuple[Callable[[], list[torch.Tensor]], Callable[[], None]]:
        """Makes the profiler's forward pass, and forward with backward pass; inputs `[samples, ...]`.

        Args:
            compute: Function of the layer's input tensors.
            inputs: Input tensors of the layer.
            trained: Trainable weights of the layer.
        """
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]

        def forward() -> list[torch.Tensor]:
            outputs = [each.detach() for each in compute(*leaves)]
            self.synchronize_device()
            return outputs

        def forward_and_backward() -> None:
            roots = [each for each in compute(*leaves) if each.requires_grad]
            if roots:
                torch.autograd.grad(
                    roots, [*leaves, *trained], list(map(torch.ones_like, roots)), allow_unused=True
                )
            self.synchronize_device()

        return forward, forward_and_backward

    def plan_notes(self) -> list[str]:
        notes = super().plan_notes() + self._context.model.describe(self._topology.stages)
        return [*notes, _ESTIMATED] if self._lacks_values else notes

    @property
    def _lacks_values(self) -> bool:
        """Whether large tensors have no values, as in plans."""
        return WithoutValues.entered is not None

    def evaluation_step(self, batch: Batch) -> None:
        if self._topology.evaluates(len(self._context.model.chunks)):
            super().evaluation_step(batch)

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.communicator.sum_over_all(tensor)

    @property
    def is_single_process(self) -> bool:
        return self.replicas * self._topology.processes == 1

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        maxima = self.communicator.max_over_all(self.tensor(np.array(numbers, np.float64)))
        return [float(number) for number in self.numpy(maxima)]

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        infos = super().describe_state(kinds, replica=replica)
        if self._has_all_stages:
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
            not self._has_all_stages and weight is not None and not self._is_local(weight)
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

    def has_equal_versions(self) -> bool:
        return self._versions is not None and self._versions.are_equal

    def _execution_state(self) -> dict[str, torch.Tensor]:
        versions = {} if self._versions is None else self._versions.state()
        return super()._execution_state() | versions

    def _write_execution_state(self, name: str, value: torch.Tensor) -> None:
        if self._versions is not None and self._versions.owns(name):
            self._versions.write(name, value)
        else:
            super()._write_execution_state(name, value)

    def close(self) -> None:
        self.drain_pipeline()
        super().close()

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
        if self._has_all_stages:
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
