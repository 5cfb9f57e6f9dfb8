"""The contract of a replica group: the replicas of one process, under any framework."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isotrain.core.contracts.computations import (
    average_gradients,
    average_state,
    slice_weights,
)
from isotrain.core.contracts.replica import Computation, ReduceOp, Replica, Tensor
from isotrain.core.contracts.state import MODEL_STATE, ExportForm, StateInfo, StateKind
from isotrain.core.data.batch import Batch
from isotrain.core.errors import IsotrainError, UnsupportedError
from isotrain.core.pipeline.actions import Action
from isotrain.core.pipeline.executor import ExecutedAction
from isotrain.core.pipeline.profile import ModelProfile

if TYPE_CHECKING:
    import numpy as np  # imported below where it is needed: plans, which start sooner without it, need none


class Trait(StrEnum):
    """A behavior of a layer because of which runs may differ between backends or numbers of replicas."""

    LOCAL_STATISTICS = "local-statistics"
    """Batch normalization over the samples of the call, such as a micro-batch."""
    GLOBAL_STATISTICS = "global-statistics"
    """Batch normalization over the global batch (synchronized batch normalization)."""
    RANDOM = "random"
    """Random numbers from the framework's generator."""
    LOWER_PRECISION = "lower-precision"
    """Computation in fewer bits than the spec's precision."""
    CUSTOM_TRAINING = "custom-training"
    """A custom train step, loss or optimizer, which isotrain does not call."""
    WITHOUT_GRADIENT = "without-gradient"
    """A trainable weight without a gradient in the last step."""
    HIDDEN = "hidden"
    """An opaque layer, which may have any of these traits."""


@dataclass(frozen=True)
class LayerTrait:
    """A trait of one layer.

    Attributes:
        trait: The behavior.
        layer: Layer name in the model; the method that is not called for `CUSTOM_TRAINING`, the weight's
            name for `WITHOUT_GRADIENT`.
        kind: Class name of the layer.
    """

    trait: Trait
    layer: str
    kind: str


class LayoutSteps:
    """Optional steps of pipeline, parameter-server and sharded runs; by default unsupported.

    Collective unless the docstring says *local* or names the caller: every process calls the method at the
    same point.
    """

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
        raise UnsupportedError(f"{type(self).__name__} is not a group of a pipeline run.")

    def gather_stages(self) -> None:
        """All-gather of a pipeline's weights: every process gets the current weights of all stages."""
        raise UnsupportedError(f"{type(self).__name__} is not a group of a pipeline run.")

    def reshard_weights(self) -> None:
        """Frees weights of other stages or shards in pipeline and fully sharded runs. Local.

        Does nothing in other runs. Called on every process before a checkpoint is read whose state is equal
        on all replicas; `gather_stages` and `unshard_weights` get the other weights back. Averages over
        replicas and converted state are written unsharded.
        """

    def enable_action_timing(self) -> None:
        """Makes `last_actions` report the pipeline steps from now on, even where timing costs time. Local."""

    def last_actions(self) -> Sequence[ExecutedAction]:
        """Timed actions of this process in the last pipeline step; empty where not recorded. Local."""
        return ()

    def profile_layers(self, batch: Batch) -> ModelProfile:
        """Times the layers of all pipeline stages on a micro-batch. Local; called before the first step."""
        raise UnsupportedError(f"{type(self).__name__} is not a group of a pipeline run.")

    def unshard_weights(self) -> None:
        """All-gather of fully sharded weights: every process holds all of them until the next step."""
        raise UnsupportedError(f"{type(self).__name__} is not a group of a fully sharded run.")

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
        raise UnsupportedError(f"{type(self).__name__} is not a group of a parameter-server run.")

    def parameter_server_stats(self) -> Mapping[str, Any]:
        """Statistics of a parameter-server run as JSON values: staleness, slices, lost workers. Local."""
        raise UnsupportedError(f"{type(self).__name__} is not a group of a parameter-server run.")

    def shard_optimizer(self, weights: Sequence[Sequence[int]]) -> None:
        """Shards the optimizer state (ZeRO stage 1): each replica updates some of the weights only. Local.

        Called before the first step, at most once.

        Args:
            weights: For each local replica, the indices of its weights among the trainable ones; at least
                one.
        """
        raise UnsupportedError(f"{type(self).__name__} updates all weights on each replica.")

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
        raise UnsupportedError(f"{type(self).__name__} updates all weights on each replica.")

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
        raise UnsupportedError(f"{type(self).__name__} returns its gradients all at once.")


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


CompressionMethod = Literal["fp16", "bf16", "powersgd", "topk"]
Phase = Literal["train", "evaluation"]


class ReplicaGroup(LayoutSteps, ABC):
    """The replicas of one process, and their communication with all others.

    Methods are collective, called by every process at the same point, unless the docstring says *local*.
    Sequences of tensors have one entry per replica of this process, in the order of `local_replicas`.
    `LayoutSteps` has the methods that only pipeline, parameter-server and sharded runs need.

    Attributes:
        replicas: Number of replicas in the run.
        local_replicas: Indices of the replicas of this process, ascending.
    """

    replicas: int
    local_replicas: tuple[int, ...]

    @abstractmethod
    def to_device(self, arrays: Any) -> Any:
        """Copies NumPy arrays to the device as the framework's tensors. Local; on any thread.

        Args:
            arrays: One array or a pytree of arrays, any shape `[samples, ...]` and dtype.

        Returns:
            Tensors of the same structure, shapes and dtypes.
        """

    def is_on_device(self, value: Any) -> bool:
        """Whether a value is already as `to_device` would return it, so that it needs no copy. Local."""
        return False

    def optimizer_lr_schedule(self) -> Callable[[int], float] | None:
        """Learning rate schedule of a custom optimizer; None where it has none. Local.

        Returns:
            Function from the number of steps done to the next step's learning rate, equal on all processes.
        """
        return None

    def optimizer_rates(self) -> tuple[float, float] | None:
        """Learning rates of an optimizer that ignores the given ones and sets its own. Local.

        Returns:
            Rates of the last and of the next update; None for optimizers that use the step's learning rate.
        """
        return None

    def weight_finalizer(self) -> Callable[[], None] | None:
        """Function by which a custom optimizer changes the weights when training ends. Local.

        Returns:
            Function that, for example, overwrites the weights of each local replica with their moving
            averages; None for optimizers that change nothing.
        """
        return None

    def synchronous_step(self, batch: Batch, learning_rate: float) -> Tensor:
        """Runs the backend's native synchronous data-parallel step (DDP). Collective.

        By default: `gradients`, an all-reduce of these and of the moving statistics as one vector, and
        `apply_gradients`. The default of `Replica.all_reduce` makes that equal to the bit on all replicas
        and in every run.

        Args:
            batch: This process's slices of the global batch, on the device. A replica's loss is the
                sum over its micro-batches of `weight * mean`; the mean of that over all replicas is
                the mean over the global batch.
            learning_rate: Learning rate of this step.

        Returns:
            Mean loss of the global batch, a scalar tensor, equal on all replicas.
        """
        gradients, loss = self.gradients(batch)
        if self.replicas > 1:
            weights = self.replica_weights(batch)
            gradients = self.compute(average_gradients, gradients, *weights)
        self.apply_gradients(gradients, learning_rate)
        return loss

    def local_step(self, batch: Batch, learning_rate: float) -> Tensor:
        """Updates each replica with the gradient of its own slice (local SGD); only the loss is all-reduced.

        A replica without samples keeps its weights. By default: `gradients`, divided by the replica's
        slice weight, and `apply_gradients`.

        Returns:
            Mean loss of the global batch, a scalar tensor, equal on all replicas.
        """
        import numpy as np

        gradients, loss = self.gradients(batch)
        weights = dict(zip(self.local_replicas, slice_weights(batch), strict=True))
        if not batch.even:
            divisors = [self.tensor(np.array(weight or 1.0)) for weight in weights.values()]
            gradients = self.compute(_divide, gradients, divisors)
        without_samples = [replica for replica, weight in weights.items() if not weight]
        before = {each: self.read_state(_UPDATED, replica=each) for each in without_samples}
        self.apply_gradients(gradients, learning_rate)
        for replica, state in before.items():
            self.write_state(state, replica=replica)
        return loss

    @abstractmethod
    def gradients(self, batch: Batch) -> tuple[list[list[Tensor]], Tensor]:
        """Computes each replica's gradients without reducing them; only the loss is all-reduced.

        Returns:
            For each local replica the gradients, one of each trainable weight's shape, in the order of the
            weights' names; and the mean loss of the global batch, a scalar. The mean of the gradients
            over all replicas is the gradient of that loss.
        """

    @abstractmethod
    def apply_gradients(self, gradients: Sequence[Sequence[Tensor]], learning_rate: float) -> None:
        """Clips and applies gradients that are already reduced, on each local replica. Local.

        Args:
            gradients: For each local replica one gradient of each trainable weight's shape, in the order of
                the weights' names.
            learning_rate: Learning rate of this step.
        """

    def replica_weights(self, batch: Batch) -> list[list[Tensor]]:
        """Slice weights as values for `compute`. Local.

        Returns:
            One value, with a scalar float64 tensor for each local replica; none where all weights are 1.
        """
        import numpy as np

        if batch.even:
            return []
        return [[self.tensor(np.array(weight)) for weight in slice_weights(batch)]]

    @contextlib.contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        """Context that restores on exit the state that computing gradients changes. Local.

        That is what `preserving_state` restores, and the accumulators of training metrics.
        """
        with self._restoring("non-trainable", "random", "metrics", "carry"):
            yield

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Context that restores on exit the state that evaluations and predictions change. Local.

        That is non-trainable weights, random streams and the states that layers carry from call to call, so
        that training goes on as if there had been no evaluation. Trainable weights are not copied.
        """
        with self._restoring("non-trainable", "random", "carry"):
            yield

    @contextlib.contextmanager
    def _restoring(self, *kinds: StateKind) -> Iterator[None]:
        before = {each: self.read_state(kinds, replica=each) for each in self.local_replicas}
        try:
            yield
        finally:
            for replica, state in before.items():
                self.write_state(state, replica=replica)

    def keep_gradients(self) -> bool:
        """Makes every later step keep a copy of its reduced gradients, for diagnosis. Local.

        Called before the first step.

        Returns:
            Whether the group supports it. Sharded runs never do: no replica has the gradients of all weights.
        """
        return False

    def kept_gradients(self) -> list[list[Tensor]]:
        """Gradients that updated the weights in the last step. Local.

        Returns:
            For each local replica one gradient of each trainable weight's shape, in the order of the
            weights' names: reduced and unscaled, before clipping.

        Raises:
            UnsupportedError: `keep_gradients` was not called, or returned False.
        """
        raise UnsupportedError(f"{type(self).__name__} keeps no gradients.")

    @abstractmethod
    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        """Runs `computation(replica, *entries)` natively for each replica of this process.

        Collective if the computation calls a collective. Where the framework compiles steps, it compiles
        this too: it traces once for each pair of computation and `static`, so everything else that the
        computation depends on must be in `values`. No gradients are recorded.

        Args:
            computation: Function of a `Replica` and that replica's entry of each of `values`.
            values: Sequences with one entry per local replica: a tensor of any shape and dtype, or a list or
                tuple of tensors.
            static: Hashable argument, equal on all processes; passed on as the keyword `static` unless None.

        Returns:
            For each local replica the computation's result.
        """

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
        return False

    @abstractmethod
    def evaluation_step(self, batch: Batch) -> None:
        """Adds a batch's loss and metrics to the evaluation accumulators. Local."""

    @abstractmethod
    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """Calls the model in evaluation mode, in the run's precision. Local.

        Args:
            inputs: For each local replica the model's inputs on the device: a tensor of shape
                `[samples, ...]`, or a pytree of such.

        Returns:
            For each local replica the model's outputs: a tensor, or tensors in dicts, lists and tuples.
        """

    @abstractmethod
    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        """Reduces the metrics over all replicas and resets them. Collective.

        Returns:
            Name to the exact mean over all samples since the last call. `evaluation` has `loss` besides the
            spec's metrics; `train` has the metrics only.
        """

    def pop_metric_state(self) -> np.ndarray:
        """Returns the accumulators of this process's training metrics, and resets them. Local.

        Returns:
            Sums, a float64 vector. Added to another group's sums they give the metrics over the samples of
            both.

        Raises:
            UnsupportedError: The metrics are not sums.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot return the sums of its metrics.")

    def add_metric_state(self, sums: np.ndarray) -> None:
        """Adds another group's sums, a float64 vector from `pop_metric_state`, to this group's. Local."""
        raise UnsupportedError(f"{type(self).__name__} cannot add the sums of other metrics.")

    def traits(self) -> list[LayerTrait]:
        """Traits of the model's layers because of which runs may differ. Local."""
        return [LayerTrait(Trait.HIDDEN, "model", type(self).__name__)]

    def plan_notes(self) -> list[str]:
        """Notes for the plan on unexpected uses of the model or the loss. Local."""
        return []

    def step_notes(self, batch: Batch) -> list[str]:
        """Notes on how steps on such batches differ from what the spec says. Local; changes no state."""
        return []

    def refuses_single_sample(self, batch: Batch) -> str | None:
        """Name of a layer that cannot train on a slice of one sample, such as batch normalization. Local.

        It may try the first slice of `batch`; it changes no state.
        """
        return None

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
        raise UnsupportedError(f"{type(self).__name__} cannot reseed by replica and step.")

    def not_checkpointed(self) -> list[str]:
        """State that affects training but that `read_state` cannot return: one sentence each. Local."""
        return []

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        """Shapes, dtypes and shards of what `read_state` would return, in the same order. Local.

        The default reads the state, of which every replica holds the full tensors; others copy nothing.
        """
        state = self.read_state(kinds, replica=replica)
        return {n: StateInfo(a.shape, a.dtype.name, a.nbytes) for n, a in state.items()}

    @abstractmethod
    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        """Copies named state to NumPy. Local.

        A group of the same backend and number of replicas that is given all of it (`ALL_STATE`), replica by
        replica, takes bitwise the same steps.

        Args:
            kinds: Kinds of state to read; see `StateKind`.
            replica: One of `local_replicas`; None for the first of them.

        Returns:
            Name to array of the tensor's shape and dtype: weights under their path, other state under
            `KIND/...`. bfloat16, which NumPy lacks, is returned as float32. Of sharded state, this replica's
            shard: State of which it is a shard; see `describe_state`.
        """

    def copy_state(
        self,
        kinds: Sequence[StateKind],
        buffers: dict[str, np.ndarray],
        *,
        replica: int | None = None,
    ) -> Callable[[], Mapping[str, np.ndarray]]:
        """Starts an asynchronous copy of the current state, for repeated checkpoints. Local.

        Args:
            kinds: Kinds of state to copy; see `StateKind`.
            buffers: Empty at first, and the same dict in every call: the group may keep arrays here and fill
                them again, which is several times as fast as new memory. The arrays of the previous call
                are then invalid.
            replica: One of `local_replicas`; None for the first of them.

        Returns:
            Function that finishes the copy and returns name to array, shapes and dtypes as from
            `read_state`; call it once, on any thread. Training may go on meanwhile: the group waits before
            it changes anything that is not copied yet.
        """
        state = self.read_state(kinds, replica=replica)
        return lambda: state

    @abstractmethod
    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        """Overwrites named state; state that is not named keeps its value. Local.

        Args:
            state: Name to array as `read_state` returns it. Of sharded state, this replica's shard or the
                full array. State that only other processes hold is skipped.
            replica: One of `local_replicas`, the only one to change; None for all of them.

        Raises:
            IsotrainError: A name is unknown, a shape differs, or the replica is not in this process.
        """

    def is_remote(self, name: str) -> bool:
        """Whether only other processes hold the named state, which is then not loaded here. Local."""
        return False

    def local_index(self, replica: int | None) -> int:
        """Index of a replica in `local_replicas`; 0 for None. Local.

        Raises:
            IsotrainError: The replica is not in this process.
        """
        if replica is None:
            return 0
        if replica not in self.local_replicas:
            local = ", ".join(map(str, self.local_replicas))
            raise IsotrainError(
                f"replica: expected one of this process's replicas ({local}), received {replica!r}."
            )
        return self.local_replicas.index(replica)

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        """Reads weights from a file in the framework's own format, without changing the replicas. Local.

        Returns:
            Name (the file's, or the model's where the file has none) to array of the weight's shape and
            dtype.

        Raises:
            IsotrainError: The file cannot be read.
            UnsupportedError: The file format is not supported.
        """
        raise UnsupportedError(
            f"initial_weights: {path}: this backend reads weights from .safetensors and .npz files only."
        )

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
        raise UnsupportedError(f"export: this backend writes no {form}.")

    def average_parameters(self) -> None:
        """All-reduces every trainable weight to its mean over all replicas, in place. Collective."""
        self.compute(_average_trainable)

    def tensor(self, array: np.ndarray) -> Tensor:
        """Tensor with a copy of a NumPy array's values, of its shape and dtype, on the device. Local."""
        return self.to_device(array)

    @abstractmethod
    def numpy(self, tensor: Tensor) -> np.ndarray:
        """Copy of a tensor as a NumPy array of its shape and dtype. Local."""

    def all_reduce(self, values: Sequence[Tensor], op: ReduceOp = "sum") -> list[Tensor]:
        """All-reduce over all replicas, outside of a computation; `Replica` has further collectives.

        Args:
            values: One tensor per local replica, of one shape and dtype on all replicas.
            op: Reduction.

        Returns:
            For each local replica the reduced tensor, equal on all replicas.
        """
        return self.compute(_all_reduce, values, static=op)

    @property
    def is_single_process(self) -> bool:
        """Whether all replicas are in this process. Local."""
        return len(self.local_replicas) == self.replicas

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """Elementwise maximum over all processes, equal on all of them. Collective.

        Args:
            numbers: Numbers of this process, as many on each process.
        """
        import numpy as np

        tensor = self.tensor(np.array(numbers, np.float64))
        reduced = self.all_reduce([tensor] * len(self.local_replicas), "max")
        return [float(number) for number in self.numpy(reduced[0])]

    def barrier(self) -> None:
        """Returns once every process has called it. Collective."""
        self.all_reduce_max([0.0])

    def synchronize_device(self) -> None:
        """Waits until this process's devices have finished all submitted work. Local.

        The default does nothing: results are complete when a call returns.
        """

    def close(self) -> None:
        """Leaves the process group. Collective; the group cannot be used afterwards."""


_UPDATED: tuple[StateKind, ...] = ("trainable", "optimizer", "loss-scale")
"""State that `apply_gradients` changes."""


def _divide(replica: Replica, gradients: Sequence[Tensor], divisor: Tensor) -> list[Tensor]:
    """Gradients of any shapes, divided by a scalar, in their dtypes. Local."""
    return [gradient / replica.ops.cast(divisor, gradient.dtype) for gradient in gradients]


def _average_trainable(replica: Replica) -> None:
    average_state(replica, ("trainable",))


def _all_reduce(replica: Replica, tensor: Tensor, *, static: ReduceOp) -> Tensor:
    """Computation that all-reduces one tensor of any shape; `static` is the reduction."""
    return replica.all_reduce(tensor, static)
