"""Replica group of one torch process, over any communicator."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from isotrain.adapters.common import weight_sharding
from isotrain.adapters.common.notes import OWN_DENOMINATOR, notes
from isotrain.adapters.common.objective import MAX_LOSSES
from isotrain.adapters.torch.base import gpu, pass_costs, private_api
from isotrain.adapters.torch.base.freed_memory import keep_freed_memory
from isotrain.adapters.torch.base.profiler import start_profile
from isotrain.adapters.torch.base.snapshot_guard import SnapshotGuard
from isotrain.adapters.torch.base.tensors import local_shard, restore, restored_after, to_numpy
from isotrain.adapters.torch.base.without_values import lacks_values
from isotrain.adapters.torch.comm.base import Communicator, Wait, all_reduce_mean_flat
from isotrain.adapters.torch.comm.late_mean import LateMeans, LateScalar, followed_by
from isotrain.adapters.torch.replica.gradient_buckets import BucketedGradients
from isotrain.adapters.torch.replica.loss_weighting import SliceWeights, without_padding_mean
from isotrain.adapters.torch.replica.metrics import MetricCollection
from isotrain.adapters.torch.replica.replica import TorchReplica
from isotrain.adapters.torch.replica.step_timer import StepTimer
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.adapters.torch.trainer.build import build_trainer, build_trainers
from isotrain.adapters.torch.trainer.local_buffers import LOCAL_BUFFERS
from isotrain.adapters.torch.trainer.modules import require_common_weights, require_synchronized
from isotrain.adapters.torch.trainer.state import (
    NamedState,
    Section,
    accumulators,
    generators,
    preserving_state,
)
from isotrain.adapters.weight_files import load_weight_arrays
from isotrain.plugin import (
    AVERAGED,
    MODEL_STATE,
    BackendConfig,
    Batch,
    CompressionMethod,
    Computation,
    ExecutedAction,
    ExportForm,
    FullyShardedGroup,
    LayerTrait,
    PassCosts,
    Phase,
    ReduceOp,
    Reduction,
    ReplicaGroup,
    Slice,
    StateInfo,
    StateKind,
    TrainingSpec,
    map_tree,
)

_ALIGNMENT = 64
"""Bytes to which torch aligns the memory that it allocates on CPUs."""


class TorchReplicaGroup(ReplicaGroup):
    """Replica group of one process: one replica's trainer, and its communicator.

    Attributes:
        trainer: Trainer of the replica.
        communicator: Communicator with the other replicas.
        statistics: Moving statistics, which are averaged over replicas in every step.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        device: torch.device,
        connect: Callable[[], Communicator],
        is_worker: bool = False,
        trainer: ReplicaTrainer | None = None,
    ) -> None:
        """Builds the model, then connects to the other replicas. Collective.

        Args:
            spec: Training spec.
            backend_config: Backend configuration of the plan.
            device: Device of this replica.
            connect: Makes the communicator; called once the model is built.
            is_worker: Whether it is a worker of a parameter-server run: any worker may compute a slice, so
                graphs are captured from the first step on.
            trainer: Trainer of the spec; None: it is built.
        """
        torch.set_num_threads(backend_config.threads)
        self._spec = spec
        self._parts = spec.parts
        self._device = device
        self._is_cpu = device.type == "cpu"
        if self._is_cpu:
            keep_freed_memory()
        self.trainer = trainer or self._build(spec, device)
        self.trainer.begin_step()
        if spec.reproducible:
            _align(self.trainer.tensors().values())
        self.communicator = connect()
        if self.communicator.replicas > 1:
            require_synchronized(self.trainer.model, device)
        self.trainer.set_split(
            self.communicator.replicas > 1
            or spec.gradient_accumulation_steps > 1
            or spec.reproducible is not None
        )
        self.communicator.wrap(self.trainer)
        self.trainer.step.connect(
            self.communicator.rank, self.communicator.replicas, self._sum_of_step, device
        )
        if not self.communicator.is_shared:
            self.trainer.seed_replica(self.communicator.rank)
        if is_worker:
            self.trainer.capture_now()
            self.trainer.step.refuse_workers()
        self.replicas = self.communicator.replicas
        if self.replicas > 1 or is_worker:
            require_common_weights(self.trainer.model)
        self.local_replicas = (self.communicator.rank,)
        self._replica = TorchReplica(self.trainer, self.communicator)
        self._rate: float | None = None
        self._late_means = LateMeans()
        self._step_timer: StepTimer | None = None
        self._kept_gradients: list[torch.Tensor] | None = None
        self._norm_parts: list[list[torch.Tensor]] | None = None
        self._gradient_norms: list[torch.Tensor] = []
        self._is_optimizer_sharded = False
        self.statistics = self.trainer.statistics if self.replicas > 1 else []
        losses = MAX_LOSSES if self.trainer.objective else len(spec.losses("torch"))
        self._metrics = MetricCollection(self.trainer, losses, device)
        self._generators = generators(device, self.trainer.generators())
        self._snapshot_guard = SnapshotGuard()
        self._state = NamedState(self._sections(), self._snapshot_guard)

    def _build(self, spec: TrainingSpec, device: torch.device) -> ReplicaTrainer:
        """Builds the trainer."""
        return build_trainer(spec, device)

    def _sections(self) -> dict[StateKind, Section]:
        """State of the replica by kind."""
        return {
            **self.trainer.sections(),
            "random": self._generators,
            "metrics": accumulators(self._metrics.training),
            "execution": Section(self._execution_state, self._write_execution_state),
        }

    def _execution_state(self) -> dict[str, torch.Tensor]:
        """Execution state of communicator and trainer: tensors of any shapes by name."""
        return self.communicator.state() | self.trainer.execution_state()

    def _write_execution_state(self, name: str, value: torch.Tensor) -> None:
        """Restores an entry of the execution state, in its shape, of the trainer or the communicator."""
        is_trainers = name in self.trainer.execution_state() or name.startswith(LOCAL_BUFFERS)
        write = self.trainer.write_execution_state if is_trainers else self.communicator.write_state
        write(name, value)

    @property
    def model(self) -> Any:
        """Model of this process's replica."""
        return self.trainer.model

    def to_device(self, arrays: Any) -> Any:
        is_array = isinstance(arrays, np.ndarray)
        return self._to_device(arrays) if is_array else map_tree(self._to_device, arrays)

    def _to_device(self, array: Any) -> torch.Tensor:
        """Tensor on the device, of an array's shape and dtype."""
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        if self._is_cpu:
            is_part = self._parts is not None and tensor.data_ptr() % _ALIGNMENT
            return tensor.clone() if is_part else tensor  # bits may depend on how memory is aligned
        return gpu.copy_from_host(tensor, self._device)

    def set_frozen(self, names: Collection[str]) -> None:
        self.trainer.zero_gradients()
        self.trainer.set_frozen(names)
        self.communicator.rewrap(self.trainer)
        self.statistics = self.trainer.changing_statistics() if self.replicas > 1 else []

    def optimizer_lr_schedule(self) -> Callable[[int], float] | None:
        return self.trainer.optimizer_lr_schedule

    def optimizer_rates(self) -> tuple[float, float] | None:
        return self.trainer.optimizer_rates()

    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        self.trainer.set_group_rates(rates)

    def momentum_setter(self) -> Callable[[float], None] | None:
        return self.trainer.momentum_setter()

    def needs_closure(self) -> bool:
        return self.trainer.needs_closure

    def weight_finalizer(self) -> Callable[[], None] | None:
        finalize = self.trainer.weight_finalizer()
        if finalize is None:
            return None

        def wait_and_finalize() -> None:
            self._snapshot_guard.wait()
            finalize()

        return wait_and_finalize

    def synchronous_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        self._set_rate(learning_rate)
        self.trainer.begin_step()
        self.trainer.step.set_batch(batch)
        if (warm_up := self.communicator.warm_up()) is not None:
            self._warm_up(warm_up, batch.slices[0][0])
        if self.trainer.needs_closure:
            return self._step_by_closure(batch)
        mean, weight = self._reduced_gradients(batch)
        self._snapshot_guard.wait_after_forward()  # a copy may still read the statistics, changed next
        if self.statistics:
            all_reduce_mean_flat(self.communicator, self.statistics, weight)
        loss = mean()
        self._update_weights()  # last: where a process is lost, a step is taken as a whole or not at all
        return loss

    def _step_by_closure(self, batch: Batch) -> torch.Tensor:
        """Lets the optimizer compute the loss as often as it needs; returns that of the first time.

        The training metrics count the samples of the first time.
        """
        self._snapshot_guard.wait_after_forward()
        calls = itertools.count()

        def closure() -> torch.Tensor:
            with restored_after(self._metrics.sums() if next(calls) else []):
                mean, weight = self._reduced_gradients(batch)
            self._keep_requested()
            if self.statistics:
                all_reduce_mean_flat(self.communicator, self.statistics, weight)
            return mean()

        return self.trainer.apply_closure(closure)

    def _reduced_gradients(self, batch: Batch) -> tuple[Wait, float]:
        """Computes the mean gradients over the global batch into `.grad`. Collective.

        Returns:
            Function that waits for the mean loss, a scalar; and the weight of this replica's slices.
        """
        trainer, communicator = self.trainer, self.communicator
        trainer.zero_gradients()
        micro_batches = batch.slices[0]
        slice_weights = SliceWeights(micro_batches, trainer, communicator, is_padding_deferred=True)
        share: torch.Tensor | None = None
        if len(micro_batches) > 1:
            with communicator.no_sync():
                for index in range(len(micro_batches) - 1):
                    share = self._backward(slice_weights, index, communicator.module, share)
        loss, last = self._forward(slice_weights, len(micro_batches) - 1, communicator.module)
        mean = communicator.reduce_loss_async(_add(share, last))
        trainer.backward(loss)
        communicator.wait_gradients()
        if slice_weights.is_padding_deferred:
            mean = self._rescale_for_padding(mean())
        return mean, slice_weights.weight

    def _rescale_for_padding(self, total: torch.Tensor) -> Wait:
        """Divides gradients and loss by the fraction of targets that are not padding.

        Args:
            total: Mean loss with padding counted, and fraction of padding, over all replicas; shape `[2]`.

        Returns:
            Function that returns the mean loss without padding, a scalar.
        """
        padding_fraction = total[1]
        if self._is_cpu and not padding_fraction:  # a GPU would have to wait for the number
            return lambda: total[0]
        counted = torch.where(padding_fraction < 1, 1 - padding_fraction, 1.0)
        weights = self.trainer.trainable.values()
        if gradients := [local_shard(w.grad) for w in weights if w.grad is not None]:
            with torch.no_grad():  # shards of gradients are views
                private_api.foreach_div_(gradients, counted)
        return lambda: without_padding_mean(total)

    def _warm_up(self, warm_up: AbstractContextManager[Any], micro_batch: Slice) -> None:
        """Runs a backward pass, gradient all-reduce included, that changes no training state."""
        self.trainer.step.set_slice(micro_batch)
        with self.preserving_training_state(), warm_up:
            loss, _ = self.communicator.module(micro_batch.inputs, micro_batch.targets)
            self.trainer.backward(loss.sum())  # it may have several elements
            self.communicator.wait_gradients()

    def _forward(
        self, slice_weights: SliceWeights, index: int, module: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scalar to differentiate, and the share of the mean loss: see `SliceWeights.of`."""
        micro_batch = slice_weights.micro_batches[index]
        self.trainer.step.set_slice(micro_batch)
        if micro_batch.count:
            loss, predictions = module(micro_batch.inputs, micro_batch.targets)
        else:
            changed = [*self.trainer.statistics, *self.trainer.local_buffers().values()]
            with restored_after(changed), self.trainer.carry.preserving_state():
                loss, predictions = module(micro_batch.inputs, micro_batch.targets)
        self._metrics.train(micro_batch, predictions)
        return slice_weights.of(index, loss)

    def _backward(
        self,
        slice_weights: SliceWeights,
        index: int,
        module: Callable[..., Any],
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        """Adds a slice's gradients to `.grad`; returns the share of the mean loss so far, scalar or `[2]`."""
        loss, share = self._forward(slice_weights, index, module)
        self.trainer.backward(loss)
        return _add(before, share)

    def _set_rate(self, rate: float) -> None:
        if rate != self._rate:
            self.trainer.set_learning_rate(rate)
            self._rate = rate

    def local_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        self._set_rate(learning_rate)
        self.trainer.step.set_batch(batch)
        slice_weights = SliceWeights(batch.slices[0], self.trainer, self.communicator, local=True)
        with self.trainer.step.local():
            mean = self._local_gradients(slice_weights)
        if slice_weights.weight > 0:
            self._update_weights()
        return self._late_means.scalar(mean)

    def _local_gradients(
        self,
        slice_weights: SliceWeights,
        slice_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Wait:
        """Computes this replica's gradients into `.grad`, without an all-reduce of these.

        The all-reduce of the loss overlaps with the last backward pass.

        Args:
            slice_weights: Micro-batches and their weights.
            slice_context: Makes the context for the passes of each slice.

        Returns:
            Function that waits for the loss of the global batch, a scalar.
        """
        self.trainer.begin_step()
        self.trainer.zero_gradients()
        module, last = self.trainer.loss_module.forward, len(slice_weights.micro_batches) - 1
        share: torch.Tensor | None = None
        for index in range(last):
            with slice_context():
                share = self._backward(slice_weights, index, module, share)
        with slice_context():
            loss, last_share = self._forward(slice_weights, last, module)
            mean = self.communicator.all_reduce_mean_async(_add(share, last_share))
            self.trainer.backward(loss)
        return (
            followed_by(mean, without_padding_mean) if slice_weights.is_padding_deferred else mean
        )

    def gradients(self, batch: Batch) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        self.trainer.step.set_batch(batch)
        slice_weights = SliceWeights(batch.slices[0], self.trainer, self.communicator)
        mean = self._local_gradients(slice_weights)
        return [self._unscaled_gradients()], mean()

    def _unscaled_gradients(self) -> list[torch.Tensor]:
        """Copies of `.grad` divided by the loss scale, in the weights' shapes; zeros where there are none."""
        scale = self.trainer.loss_scale()
        return [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / scale
            for parameter in self.trainer.trainable.values()
        ]

    def part_sums(self, batch: Batch) -> Iterator[list[list[torch.Tensor]]]:
        assert batch.part_counts is not None
        trainer = self.trainer
        trainer.begin_step()
        trainer.step.set_batch(batch)
        slice_weights = SliceWeights(
            batch.slices[0], trainer, self.communicator, part_counts=batch.part_counts
        )
        statistics = trainer.changing_statistics()
        counters = [each for each in trainer.frozen.values() if not each.is_floating_point()]
        before = [each.clone() for each in (*statistics, *counters)]
        with self._metrics.measuring("train") as added:
            for index, micro_batch in enumerate(batch.slices[0]):
                trainer.zero_gradients()
                is_last = index == len(batch.slices[0]) - 1  # counters count steps
                restored = statistics if is_last else [*statistics, *counters]
                try:
                    share = self._backward(slice_weights, index, trainer.loss_module.forward, None)
                    weighted = [each * micro_batch.weight for each in statistics]
                finally:
                    restore(restored, before[: len(restored)])
                gradients = [
                    torch.zeros_like(weight) if (gradient := weight.grad) is None else gradient
                    for weight in trainer.trainable.values()
                ]
                yield [[*gradients, share, *weighted, *added()]]

    def evaluation_part_sums(self, batch: Batch) -> Iterator[list[list[torch.Tensor]]]:
        with self._metrics.measuring("evaluation") as added:
            for micro_batch in batch.slices[0]:
                self.evaluation_step(replace(batch, slices=((micro_batch,),)))
                yield [added()]

    def accumulate(
        self, sums: Sequence[torch.Tensor], addends: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        private_api.foreach_add_(sums, addends)
        return sums

    def add_part_sums(self, phase: Phase, sums: Sequence[Sequence[torch.Tensor]]) -> None:
        statistics = self.trainer.changing_statistics() if phase == "train" else []
        added = sums[0][len(statistics) :]
        with torch.no_grad():
            for statistic, value in zip(statistics, sums[0], strict=False):
                statistic.copy_(value)
            if self.communicator.rank == 0:
                for total, value in zip(self._metrics.sums(phase), added, strict=True):
                    total.add_(value)

    def apply_gradients(
        self, gradients: Sequence[Sequence[torch.Tensor]], learning_rate: float
    ) -> None:
        self._set_rate(learning_rate)
        frozen = self.trainer.session_frozen
        scaled = private_api.foreach_mul(list(gradients[0]), self.trainer.loss_scale())
        for (name, weight), gradient in zip(self.trainer.trainable.items(), scaled, strict=True):
            weight.grad = None if name in frozen else gradient
        self._update_weights(
            self.trainer.clipping_norm(gradients[0]) if self._is_optimizer_sharded else None
        )

    def _update_weights(self, norm: torch.Tensor | None = None) -> None:
        """Clips and applies the gradients in `.grad`; copies or measures them first if requested.

        Args:
            norm: Global norm to clip by, as in `ReplicaTrainer.apply`; None: that which was measured.
        """
        measured = self._keep_requested()
        self._snapshot_guard.wait_after_forward()
        self.trainer.apply(measured if norm is None else norm)

    def _keep_requested(self) -> torch.Tensor | None:
        """Copies the gradients in `.grad`, and measures their norms, if requested.

        Returns:
            The norm of all gradients, a scalar, if they are clipped by it and were measured.
        """
        if self._kept_gradients is not None:
            self._kept_gradients = self._unscaled_gradients()
        if self._norm_parts is None:
            return None
        scale = self.trainer.loss_scale()
        of_all, *parts = (
            [each.grad for each in part if each.grad is not None]
            for part in (self.trainer.updated, *self._norm_parts)
        )
        clipping_norm = self.trainer.clipping_norm(of_all) if scale == 1.0 else None
        norms = [nn.utils.get_total_norm(part) / scale for part in parts]
        total = nn.utils.get_total_norm(of_all) / scale if clipping_norm is None else clipping_norm
        self._gradient_norms = [total, *norms]
        return clipping_norm

    def shard_optimizer(self, weights: Sequence[Sequence[int]]) -> None:
        self._is_optimizer_sharded = True
        self.trainer.shard_optimizer(weights[0])
        self._rate = None  # another optimizer

    def reduce_scatter_gradients(
        self, batch: Batch, reduction: Reduction
    ) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        self.trainer.step.set_batch(batch)
        bucketed = BucketedGradients(self.trainer, self._replica, reduction)
        slice_weights = SliceWeights(batch.slices[0], self.trainer, self.communicator)
        mean = self._local_gradients(
            slice_weights, bucketed.during_backward if reduction.each_slice else nullcontext
        )
        if not reduction.each_slice:
            bucketed.reduce_all()
        return [bucketed.reduced], mean()

    def update_shard(
        self,
        gradients: Sequence[Sequence[torch.Tensor]],
        learning_rate: float,
        norms: Sequence[torch.Tensor] | None,
    ) -> None:
        self._set_rate(learning_rate)
        for parameter, gradient in zip(self.trainer.updated, gradients[0], strict=True):
            parameter.grad = gradient
        self._snapshot_guard.wait_after_forward()
        self.trainer.apply(None if norms is None else norms[0])
        for parameter in self.trainer.updated:
            parameter.grad = None

    def savepoint(self) -> Callable[[], None]:
        restore, restore_carry = super().savepoint(), self.trainer.carry.savepoint()

        def restore_all() -> None:
            restore()
            restore_carry()

        return restore_all

    @contextlib.contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        changed = [*self._local_frozen(), *self._metrics.sums()]
        carry, eagerly = self.trainer.carry.preserving_state(), self.trainer.eagerly()
        with (
            restored_after(changed),
            carry,
            preserving_state(self._generators),
            eagerly,
        ):  # eagerly: graph capture must not count these calls
            yield

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        with (
            restored_after(self.trainer.self_updating),
            self.trainer.carry.preserving_state(),
            preserving_state(self._generators),
        ):
            yield

    def _local_frozen(self) -> list[torch.Tensor]:
        """Up-to-date non-trainable tensors of this process, any shape."""
        return list(self.trainer.frozen.values())

    def keep_gradients(self) -> bool:
        if not self._is_optimizer_sharded:
            self._kept_gradients = []
        return not self._is_optimizer_sharded

    def kept_gradients(self) -> list[list[torch.Tensor]]:
        assert self._kept_gradients is not None
        return [self._kept_gradients]

    def keep_gradient_norms(self, parts: Sequence[Sequence[int]]) -> None:
        weights = list(self.trainer.trainable.values())
        self._norm_parts = [[weights[index] for index in part] for part in parts]

    def gradient_norms(self) -> list[torch.Tensor]:
        return self._gradient_norms

    def start_profile(self, folder: Path) -> Callable[[], None]:
        return start_profile(folder)

    def set_action_timing(self, enabled: bool) -> None:
        # A GPU computes after the calls have returned; FSDP exchanges weights within the passes.
        can_time = self._is_cpu and not isinstance(self, FullyShardedGroup)
        if enabled and can_time and self._step_timer is None:
            self._step_timer = StepTimer(self)
        if self._step_timer is not None:
            self._step_timer.enabled = enabled

    def last_actions(self) -> Sequence[ExecutedAction]:
        return () if self._step_timer is None else self._step_timer.executed

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        options = {} if static is None else {"static": static}
        self._snapshot_guard.wait()
        with torch.no_grad():
            return [computation(self._replica, *(value for (value,) in values), **options)]

    def all_reduce_async(
        self, values: Sequence[torch.Tensor], op: ReduceOp = "sum"
    ) -> Callable[[], list[torch.Tensor]]:
        (value,) = values
        wait = self.communicator.all_reduce_async(value, op)
        return lambda: [wait()]

    def all_gather_async(self, values: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        (value,) = values
        wait = self.communicator.all_gather_async(value)
        return lambda: [wait()]

    def copy_averaged(self) -> list[list[torch.Tensor]]:
        return [[tensor.detach().clone() for tensor in self._averaged()]]

    def update_averages(
        self, averages: Sequence[Sequence[torch.Tensor]], weight: float
    ) -> list[list[torch.Tensor]]:
        (average,) = averages
        with torch.no_grad():
            private_api.foreach_lerp_(average, self._averaged(), weight)
        return [list(average)]

    def _averaged(self) -> list[torch.Tensor]:
        """Trainable weights and moving statistics, in the order of `Replica.read(AVERAGED)`."""
        return [tensor for part in AVERAGED for tensor in self.trainer.part(part)]

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        return self.communicator.compress(method, rank, start)

    def evaluation_step(self, batch: Batch) -> None:
        self.trainer.step.set_batch(batch, "evaluation")
        for micro_batch in batch.slices[0]:
            self.trainer.step.set_slice(micro_batch)
            self._metrics.evaluate(micro_batch)

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        return [self.trainer.predict(each) for each in inputs]

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        return self._metrics.collect(phase, self._sum_over_processes)

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce sum of a tensor of any shape over all processes."""
        return self.communicator.all_reduce(tensor, "sum")

    def pop_metric_state(self) -> np.ndarray:
        return self._metrics.pop_sums()

    def add_metric_state(self, sums: np.ndarray) -> None:
        self._metrics.add_sums(sums)

    def traits(self) -> list[LayerTrait]:
        return self.trainer.traits() + self.trainer.without_gradient()

    def plan_notes(self) -> list[str]:
        return notes(self._spec, "torch", self.traits()) + self.trainer.model_notes()

    def step_notes(self, batch: Batch) -> list[str]:
        micro_batch = batch.slices[0][0]
        if self._takes_step:  # computing it could communicate
            return self.trainer.notes(micro_batch.inputs, micro_batch.targets)
        with self.trainer.carry.preserving_state(), self.trainer.step.alone():
            has_denominator = self.trainer.has_own_denominator(
                micro_batch.inputs, micro_batch.targets
            )
            return (
                self.trainer.notes(micro_batch.inputs, micro_batch.targets)
                + [OWN_DENOMINATOR] * has_denominator
            )

    def pass_costs(self, batch: Batch) -> PassCosts | None:
        if self._takes_step:  # it may communicate
            return None
        micro_batch = batch.slices[0][0]
        self.trainer.begin_step()
        weights = [each for each in self.trainer.trainable.values() if each.requires_grad]
        with self.preserving_training_state(), self.trainer.step.alone(), self.trainer.eagerly():
            self.trainer.step.set_slice(micro_batch)
            try:
                return pass_costs.pass_costs(
                    self.trainer.loss_module.forward,
                    micro_batch.inputs,
                    micro_batch.targets,
                    weights,
                    self.trainer.tensors().values(),
                )
            except Exception:  # a model may read values of tensors, which have none
                return None

    def refuses_single_sample(self, batch: Batch) -> str | None:
        micro_batch = batch.slices[0][0]
        inputs, targets = map_tree(lambda rows: rows[:1], (micro_batch.inputs, micro_batch.targets))
        with self.preserving_training_state(), self.trainer.step.alone():
            return self.trainer.untrainable_layer(inputs, targets)

    def _sum_of_step(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor of any shape for an objective, in a process group of its own. Collective."""
        return self.communicator.all_reduce_within(tensor, (tuple(range(self.replicas)),))

    @property
    def _takes_step(self) -> bool:
        return self.trainer.objective is not None and self.trainer.objective.step is not None

    def objective_communicates(self) -> bool:
        return self.trainer.step.communicates

    def reseed(self, replica: int, step: int) -> None:
        self.trainer.reseed(replica, step)

    def not_checkpointed(self) -> list[str]:
        return self.trainer.not_checkpointed()

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        self.local_index(replica)
        infos = weight_sharding.mark_local_slots(
            self._state.describe(kinds), self.trainer.is_local_slot
        )
        tied = {n: a for n, a in self.trainer.aliases.items() if n in infos}
        return infos | {n: replace(infos[n], aliases=names) for n, names in tied.items()}

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        self.local_index(replica)
        return self._state.read(kinds)

    def copy_state(
        self,
        kinds: Sequence[StateKind],
        buffers: dict[str, np.ndarray],
        *,
        replica: int | None = None,
    ) -> Callable[[], Mapping[str, np.ndarray]]:
        self.local_index(replica)
        return self._state.copy(kinds, buffers)

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        self.local_index(replica)
        self._snapshot_guard.wait()
        self._state.write({n: v for n, v in state.items() if not self.is_remote(n)})
        self._rate = None  # the state may have another learning rate

    def is_remote(self, name: str) -> bool:
        return weight_sharding.is_remote(name, self.trainer.is_remote_slot)

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        return load_weight_arrays(path, self.model)

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        self.trainer.export(form, target, inputs)

    def average_parameters(self) -> None:
        self._snapshot_guard.wait()
        all_reduce_mean_flat(self.communicator, list(self.trainer.trainable.values()), 1.0)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(self._device)

    def numpy(self, tensor: torch.Tensor) -> np.ndarray:
        return to_numpy(tensor)

    def snapshot_scalar(self, value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, LateScalar)
        return value.detach().clone() if is_tensor else super().snapshot_scalar(value)

    def barrier(self) -> None:
        self.communicator.barrier()

    def synchronize_device(self) -> None:
        self.communicator.require_all_reduced()
        self._late_means.wait()
        gpu.synchronize(self._device)

    def close(self) -> None:
        self.trainer.close()
        self.communicator.close()


def _align(tensors: Iterable[torch.Tensor]) -> None:
    """Moves tensors, any shapes, to addresses as torch allocates: matrix kernels add by alignment."""
    for tensor in tensors:
        if not lacks_values(tensor) and tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


def _add(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    """Sum of two tensors of one shape; `term` where there is no total yet."""
    return term if total is None else total + term


def start_updates(
    spec: TrainingSpec,
    backend_config: BackendConfig,
    device: torch.device,
    connect: Callable[[], Communicator],
) -> dict[str, ReplicaGroup]:
    """Builds the model, and a replica group for each named update; then connects. Collective.

    Args:
        spec: Training spec with `updates`.
        backend_config: Backend configuration of the plan.
        device: Device of this replica.
        connect: Makes the communicator; called once the model is built.
    """
    torch.set_num_threads(backend_config.threads)
    (first, trainer), *others = build_trainers(spec, device).items()
    group = TorchReplicaGroup(
        spec.for_update(first), backend_config, device, connect, trainer=trainer
    )
    groups: dict[str, ReplicaGroup] = {first: group}
    for name, trainer in others:
        groups[name] = TorchReplicaGroup(
            spec.for_update(name),
            backend_config,
            device,
            group.communicator.for_update,
            trainer=trainer,
        )
    return groups
