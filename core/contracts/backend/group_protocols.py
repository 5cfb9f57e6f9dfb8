"""Further capabilities of a replica group: one protocol for each, which a group has by having its methods.

Methods are collective, called by every process at the same point, unless the docstring says *local* or names
the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.backend.replica import Computation, Tensor
from isotrain.core.contracts.state import ExportForm
from isotrain.core.data.batch import Batch
from isotrain.core.pipeline.actions import Action
from isotrain.core.pipeline.delayed_updates import DelayedUpdates
from isotrain.core.pipeline.executor import ExecutedAction
from isotrain.core.pipeline.profile import ModelProfile

if TYPE_CHECKING:
    import numpy as np

    from isotrain.core.contracts.backend.replica_group import Phase

CompressionMethod = Literal["fp16", "bf16", "powersgd", "topk"]


@dataclass(frozen=True)
class Reduction:
    """A strategy's reduction of gradients in buckets; equal on all processes.

    Attributes:
        buckets: For each bucket the indices of its weights among the trainable ones; each weight is in
            exactly one bucket.
        statics: For each bucket the `static` argument of `reduce`.
        reduce: Function `reduce(replica, gradients, static=...)` of a bucket's gradients; returns the list of
            tensors to keep, such as this replica's shard of the sum.
        each_slice: True: called for the gradients of each slice, and the results are summed over the slices
            of a step. False: called once, for the accumulated gradients.
    """

    buckets: tuple[tuple[int, ...], ...]
    statics: tuple[Hashable, ...]
    reduce: Computation
    each_slice: bool = False


@runtime_checkable
class PipelineGroup(Protocol):
    """Replica group with one stage of a replica in each process (`pipeline-step`)."""

    def pipeline_step(
        self, batch: Batch, learning_rate: float, actions: Sequence[Sequence[Action]]
    ) -> Tensor:
        """Runs the pipeline schedule for a global batch and updates the weights of each stage. Collective.

        Args:
            batch: Slices of this process's replica, the same on all of its stages; a slice is a micro-batch.
            learning_rate: Learning rate of this step.
            actions: Schedule of each stage: its forward and backward passes and transfers, in order.

        Returns:
            Mean loss of the global batch, a scalar tensor, equal on all processes.
        """

    def gather_stages(self) -> None:
        """All-gathers a pipeline's weights: every process gets the current ones of all stages. Collective."""

    def profile_layers(self, batch: Batch) -> ModelProfile:
        """Times layers, loss and update of all stages on a micro-batch. Local; before the first step.

        Where values lack, as in plans, the times of the layers are estimated and the others are 0.
        """


@runtime_checkable
class DelayedUpdatesGroup(Protocol):
    """Pipeline group that leaves passes of a step for the next one (`delayed-updates`).

    Between two such steps it holds the weights as they were before the updates of the passes that are left.
    `PipelineGroup.gather_stages`, `ReplicaGroup.reshard_weights` and `write_state` drain the pipeline first;
    `write_state` of a weight sets all of its versions. Versions before the last one are `execution` state.
    """

    def start_delayed_updates(self, updates: DelayedUpdates) -> None:
        """Keeps the versions of the weights that passes need. Called once, before the first step.

        Args:
            updates: Actions of each process, and the version for each micro-batch.
        """

    def delayed_step(self, batch: Batch, learning_rate: float) -> Tensor:
        """Runs the forward passes of a global batch, and the passes left of the one before. Collective.

        It does the update of the one before, or, within steps, one by each backward pass.

        Args:
            batch: Slices, as in `PipelineGroup.pipeline_step`.
            learning_rate: Learning rate for the updates with this global batch.

        Returns:
            Mean loss of the global batch, a scalar tensor, equal on all processes.
        """

    def drain_pipeline(self) -> None:
        """Runs the passes that are left, and does the updates of the last global batch. Collective."""

    def has_equal_versions(self) -> bool:
        """Whether `write_state` set weights, and since then no update and no earlier version came. Local."""


@runtime_checkable
class ActionTimingGroup(Protocol):
    """Replica group that can time what its steps are made of."""

    def set_action_timing(self, enabled: bool) -> None:
        """Whether `last_actions` reports later steps, even where that costs time. Called by all processes."""

    def last_actions(self) -> Sequence[ExecutedAction]:
        """Timed actions of this process in the last step, in order; empty where not recorded. Local.

        What comes after the last one is part of the update.
        """


@runtime_checkable
class ShardedGroup(Protocol):
    """Replica group whose replicas each update a shard of the weights, ZeRO stages 1 and 2.

    Capabilities `update-shard` and `reduce-scatter-gradients`; its replicas are a `ShardedReplica` each.
    """

    def shard_optimizer(self, weights: Sequence[Sequence[int]]) -> None:
        """Shards the optimizer state (ZeRO stage 1): each replica updates some of the weights only. Local.

        Called before the first step, at most once. From then on `apply_gradients` clips by the gradients of
        all weights, as before, and updates each replica's weights alone.

        Args:
            weights: For each local replica, the indices of its weights among the trainable ones; at least
                one.
        """

    def reduce_scatter_gradients(
        self, batch: Batch, reduction: Reduction
    ) -> tuple[list[list[Tensor]], Tensor]:
        """Computes gradients and reduces them bucket by bucket, freeing each (ZeRO stage 2). Collective.

        Args:
            batch: This process's slices of the global batch, on the device.
            reduction: The buckets and the function that reduces one.

        Returns:
            For each local replica the tensors that `reduction.reduce` returned, in the order of the buckets;
            and the mean loss of the global batch, a scalar.
        """

    def update_shard(
        self,
        gradients: Sequence[Sequence[Tensor]],
        learning_rate: float,
        norms: Sequence[Tensor] | None,
    ) -> None:
        """Clips and applies reduced gradients of each replica's shard of the weights (ZeRO). Local.

        Args:
            gradients: For each local replica, one gradient of the weight's shape and dtype for each weight of
                its shard, in the order given to `shard_optimizer`.
            learning_rate: Learning rate of this step.
            norms: Global gradient norm, a scalar for each local replica, equal on all; None unless the spec
                clips by it.
        """


@runtime_checkable
class FullyShardedGroup(Protocol):
    """Replica group that holds shards of weights, as in FSDP or tensor parallelism (`unshard-weights`)."""

    def unshard_weights(self) -> None:
        """All-gathers sharded weights, which every process has until the next step. Collective."""


@runtime_checkable
class ParameterServerGroup(Protocol):
    """Replica group of the coordinator of a parameter-server run (`parameter-server-step`)."""

    def parameter_server_step(
        self, batch: Batch, learning_rate: float, staleness: int | None
    ) -> Tensor:
        """Schedules the slices of a global batch on the workers. Called by the coordinator alone.

        Args:
            batch: All slices of the global batch.
            learning_rate: Learning rate of this step.
            staleness: 0 for synchronous steps: one update with the mean gradient. Otherwise each slice's
                gradient is applied on arrival, with its part of the learning rate, and is computed with
                weights that lack at most the updates of the last `staleness` global batches (bounded
                staleness); None: of any number.

        Returns:
            Mean loss of the global batch, a scalar. With staleness it may be a future: `float` waits for it.
        """

    def parameter_server_stats(self) -> Mapping[str, Any]:
        """Statistics of a parameter-server run as JSON values: staleness, slices, lost workers. Local."""


@runtime_checkable
class WorkerGroup(Protocol):
    """Replica group of one replica that can be a worker, or hold the weights, in a parameter-server run."""

    def reseed(self, replica: int, step: int) -> None:
        """Reseeds random layers as a function of replica and step. Local.

        Workers of a parameter-server run call it before each slice, so that random numbers depend neither on
        the worker nor on its earlier slices, and resumed runs draw the same.

        Args:
            replica: Index of the replica whose slice is computed, perhaps by another replica's worker.
            step: Step of the run, from 0.

        Raises:
            UnsupportedError: The model cannot be reseeded, and so cannot be trained by workers.
        """

    def pop_metric_state(self) -> np.ndarray:
        """Returns the accumulators of this process's training metrics, and resets them. Local.

        Returns:
            Sums, a float64 vector. Added to another group's sums they give the metrics over the samples of
            both.

        Raises:
            UnsupportedError: The metrics are not sums.
        """

    def add_metric_state(self, sums: np.ndarray) -> None:
        """Adds another group's sums, a float64 vector from `pop_metric_state`, to this group's. Local."""


@runtime_checkable
class ExportingGroup(Protocol):
    """Replica group that writes the file formats in `exports` of its adapter."""

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        """Writes the trained model to a file or folder. Local; for groups of one replica.

        Args:
            form: File format, one of the adapter's `exports`.
            target: File or folder to write; its name has a suffix of the format.
            inputs: Example inputs on the device, shape `[samples, ...]` or a pytree of such; None where
                unknown.

        Raises:
            UnsupportedError: The model cannot be written in this format.
            SpecError: The format needs example inputs, and there are none.
        """


@runtime_checkable
class WeightsFileGroup(Protocol):
    """Replica group that reads weights from files in formats of its framework."""

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        """Reads weights from a file in the framework's own format, without changing the replicas. Local.

        Returns:
            Name (the file's, or the model's where the file has none) to array of the weight's shape and
            dtype.

        Raises:
            IsotrainError: The file cannot be read.
            UnsupportedError: The file format is not supported.
        """


@runtime_checkable
class CompressingGroup(Protocol):
    """Replica group with native gradient compression."""

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        """Requests native gradient compression in synchronous steps. Local.

        Called before the first step, at most once.

        Args:
            method: Compression method.
            rank: Rank of the low-rank approximation of `powersgd`.
            start: Steps without compression before `powersgd` begins.

        Returns:
            Whether the backend has the method; if not, nothing changes.
        """


@runtime_checkable
class GradientKeepingGroup(Protocol):
    """Replica group that can keep a copy of the gradients of each step, for diagnosis."""

    def keep_gradients(self) -> bool:
        """Makes every later step keep a copy of its reduced gradients, for diagnosis. Local.

        Called before the first step.

        Returns:
            Whether the group supports it. Sharded runs never do: no replica has the gradients of all weights.
        """

    def kept_gradients(self) -> list[list[Tensor]]:
        """Gradients that updated the weights in the last step, once `keep_gradients` returned True. Local.

        Returns:
            For each local replica one gradient of each trainable weight's shape, in the order of the
            weights' names: reduced and unscaled, before clipping.
        """


@runtime_checkable
class FreezingGroup(Protocol):
    """Replica group that can freeze weights within a run, and train them again (`session.freeze`)."""

    def set_frozen(self, names: Collection[str]) -> None:
        """Makes later steps leave these weights and their optimizer state as they are. Collective.

        They get no gradients, and none are exchanged. A layer all of whose weights are named computes as in
        evaluation. Earlier calls are void: what is not named is trained as at the start of the run.

        Args:
            names: Names of weights, trainable ones and others, of which at least one trainable is left out.

        Raises:
            UnsupportedError: The backend, the optimizer or the model cannot do it.
        """


@runtime_checkable
class GradientNormGroup(Protocol):
    """Replica group that can measure the gradients of each step (`gradient_norm` of the spec)."""

    def keep_gradient_norms(self, parts: Sequence[Sequence[int]]) -> None:
        """Makes every later step measure its gradients. Local; called before the first step.

        Args:
            parts: Indices of trainable weights whose gradients have a norm of their own, for each such norm.
        """

    def gradient_norms(self) -> list[Tensor]:
        """L2 norms of the gradients that updated the weights in the last step. Local.

        Returns:
            Scalar tensors, equal on all replicas: the norm of all gradients together, then that of each part.
            The gradients are the reduced and unscaled ones, before clipping. They are not waited for.
        """


@runtime_checkable
class OrderedSumsGroup(Protocol):
    """Replica group whose sums over parts of a batch are taken elsewhere, in one order (`ordered-sums`)."""

    def part_sums(self, batch: Batch) -> Iterator[list[list[Tensor]]]:
        """Computes what each micro-batch of a training step adds to the sums of the step.

        Collectives come before the first result only: replicas may have different numbers of micro-batches.

        Args:
            batch: Micro-batches whose weights are fractions of the global batch; `part_counts` says how many
                of them each replica of the run has. All may have one more, the same one, to compare their
                bits: it is computed like the others, and does not count in denominators of losses.

        Yields:
            For each micro-batch in turn, for each local replica, tensors to be summed over all micro-batches
            of all replicas: the gradients in the order of the weights' names, the loss, the changed moving
            statistics times the weight, and the sums of training metrics. Statistics and metrics are left as
            they were. Of a replica that has fewer micro-batches than another one the last are not used.
        """

    def evaluation_part_sums(self, batch: Batch) -> Iterator[list[list[Tensor]]]:
        """Computes what each micro-batch of an evaluation adds to loss and metrics; changes nothing. Local.

        Yields:
            For each micro-batch in turn, for each local replica, tensors as in `part_sums`.
        """

    def accumulate(self, sums: Sequence[Tensor], addends: Sequence[Tensor]) -> Sequence[Tensor]:
        """Adds each of the addends to the sum at its position. Local.

        Args:
            sums: Tensors of any shapes and dtypes, each in memory of its own.
            addends: Tensors of the same shapes and dtypes. Neither they nor the old sums are read again.

        Returns:
            The new sums, with the bits of `sum + addend`, maybe in the memory of `sums`.
        """

    def add_part_sums(self, phase: Phase, sums: Sequence[Sequence[Tensor]]) -> None:
        """Sets moving statistics, and adds sums over all parts to the metrics of replica 0 alone. Local.

        Args:
            phase: Phase of the metrics.
            sums: For each local replica the sums of what follows the loss in `part_sums`, or all of
                `evaluation_part_sums`.
        """


@runtime_checkable
class ProfilingGroup(Protocol):
    """Replica group whose framework has a profiler (`profile` of the spec)."""

    def start_profile(self, folder: Path) -> Callable[[], None]:
        """Starts the framework's profiler in this process. Local.

        Args:
            folder: Folder for its files, which exists.

        Returns:
            Function that stops it and writes the files, after the device has been synchronised.
        """


GROUP_PROTOCOLS: Mapping[type, frozenset[Capability]] = {
    ParameterServerGroup: frozenset({Capability.PARAMETER_SERVER_STEP}),
    WorkerGroup: frozenset(),
    ShardedGroup: frozenset({Capability.UPDATE_SHARD, Capability.REDUCE_SCATTER_GRADIENTS}),
    FullyShardedGroup: frozenset({Capability.UNSHARD_WEIGHTS}),
    PipelineGroup: frozenset({Capability.PIPELINE_STEP}),
    DelayedUpdatesGroup: frozenset({Capability.DELAYED_UPDATES}),
    ExportingGroup: frozenset(),
    WeightsFileGroup: frozenset(),
    CompressingGroup: frozenset(),
    GradientKeepingGroup: frozenset(),
    FreezingGroup: frozenset(),
    GradientNormGroup: frozenset(),
    ProfilingGroup: frozenset(),
    ActionTimingGroup: frozenset(),
    OrderedSumsGroup: frozenset({Capability.ORDERED_SUMS}),
}
"""Protocol to the capabilities that a group has by it."""
