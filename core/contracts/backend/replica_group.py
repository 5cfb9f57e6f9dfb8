"""The contract of a replica group: the replicas of one process, under any framework."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from isotrain.core.contracts.backend.computations import (
    average_gradients,
    average_state,
    slice_weights,
)
from isotrain.core.contracts.backend.group_hooks import GroupHooks
from isotrain.core.contracts.backend.protocol_checks import Contract
from isotrain.core.contracts.backend.replica import (
    Computation,
    ReduceOp,
    Replica,
    StatePart,
    Tensor,
)
from isotrain.core.contracts.state import MODEL_STATE, StateInfo, StateKind
from isotrain.core.data.batch import Batch
from isotrain.core.errors import IsotrainError

if TYPE_CHECKING:
    import numpy as np  # imported below where it is needed: plans, which start sooner without it, need none

Phase = Literal["train", "evaluation"]


class ReplicaGroup(GroupHooks, Contract):
    """The replicas of one process, and their communication with all others.

    A backend writes the abstract methods; all others have exact defaults. Further capabilities, such as
    pipeline steps, are protocols in `group_protocols`.

    Methods are collective, called by every process at the same point, unless the docstring says *local*.
    Sequences of tensors have one entry per replica of this process, in the order of `local_replicas`.

    Attributes:
        replicas: Number of replicas in the run.
        local_replicas: Indices of the replicas of this process, ascending.
    """

    replicas: int
    local_replicas: tuple[int, ...]

    @property
    def updates(self) -> Mapping[str, ReplicaGroup]:
        """Groups of the named updates by name; without any, this group under an empty name. Local."""
        return {"": self}

    @abstractmethod
    def to_device(self, arrays: Any) -> Any:
        """Copies NumPy arrays to the device as the framework's tensors. Local; on any thread.

        Args:
            arrays: One array or a pytree of arrays, any shape `[samples, ...]` and dtype.

        Returns:
            Tensors of the same structure, shapes and dtypes.
        """

    @abstractmethod
    def numpy(self, tensor: Tensor) -> np.ndarray:
        """Copy of a tensor as a NumPy array of its shape and dtype. Local."""

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
            shard: see `describe_state`.
        """

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

        A replica without samples keeps its weights and optimizer state. By default: `gradients`, divided by
        the replica's slice weight, and `apply_gradients`; optimizer state that this creates on a replica
        without samples is set to zero.

        Returns:
            Mean loss of the global batch, a scalar tensor, equal on all replicas. It may come later, so that
            a step waits for no other replica: `float` then waits, and its attribute `is_ready` tells whether.
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
            after = self.read_state(_UPDATED, replica=replica)
            created = {name: np.zeros_like(after[name]) for name in after.keys() - state.keys()}
            self.write_state(created | state, replica=replica)
        return loss

    def average_parameters(self) -> None:
        """All-reduces every trainable weight to its mean over all replicas, in place. Collective."""
        self.compute(_average_trainable)

    def copy_averaged(self) -> list[list[Tensor]]:
        """Copies the trainable weights and moving statistics of each local replica, to average them. Local.

        A group has one average: a later call may overwrite what an earlier one has returned.

        Returns:
            For each local replica tensors that, flattened one after the other, are `Replica.read(AVERAGED)`.
        """
        return [[vector] for vector in self.compute(_read_averaged)]

    def update_averages(
        self, averages: Sequence[Sequence[Tensor]], weight: float
    ) -> list[list[Tensor]]:
        """Moves averages towards the present weights: `average + weight * (present - average)`. Local.

        Args:
            averages: Averages from this method or `copy_averaged`, which may be overwritten.
            weight: Weight of the present weights, above 0 and at most 1.
        """
        import numpy as np

        factors = [self.tensor(np.array(weight))] * len(self.local_replicas)
        return self.compute(_move_average, averages, factors)

    def replica_weights(self, batch: Batch) -> list[list[Tensor]]:
        """Slice weights as values for `compute`. Local.

        Returns:
            One value, with a scalar float64 tensor for each local replica; none where all weights are 1.
        """
        import numpy as np

        if batch.even:
            return []
        return [[self.tensor(np.array(weight)) for weight in slice_weights(batch)]]

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        """Shapes, dtypes and shards of what `read_state` would return, in the same order. Local.

        The default reads the state, of which every replica holds the full tensors; others copy nothing.
        """
        state = self.read_state(kinds, replica=replica)
        return {n: StateInfo(a.shape, a.dtype.name, a.nbytes) for n, a in state.items()}

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

    def savepoint(self) -> Callable[[], None]:
        """Copies the state that computing gradients changes, except for random streams. Local.

        Returns:
            Function that restores it; metrics' accumulators that are new by then become zero.
        """
        kinds: tuple[StateKind, ...] = ("non-trainable", "metrics", "carry")
        before = {each: self.read_state(kinds, replica=each) for each in self.local_replicas}

        def restore() -> None:
            for replica, state in before.items():
                sums = self.read_state(("metrics",), replica=replica)
                new = {name: 0 * array for name, array in sums.items() if name not in state}
                self.write_state({**new, **state}, replica=replica)

        return restore

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

    @property
    def is_single_process(self) -> bool:
        """Whether all replicas are in this process. Local."""
        return len(self.local_replicas) == self.replicas

    def tensor(self, array: np.ndarray) -> Tensor:
        """Tensor with a copy of a NumPy array's values, of its shape and dtype, on the device. Local."""
        return self.to_device(array)

    def all_reduce(self, values: Sequence[Tensor], op: ReduceOp = "sum") -> list[Tensor]:
        """All-reduce over all replicas, outside of a computation; `Replica` has further collectives.

        Args:
            values: One tensor per local replica, of one shape and dtype on all replicas.
            op: Reduction.

        Returns:
            For each local replica the reduced tensor, equal on all replicas.
        """
        return self.compute(_all_reduce, values, static=op)

    def all_reduce_async(
        self, values: Sequence[Tensor], op: ReduceOp = "sum"
    ) -> Callable[[], list[Tensor]]:
        """Starts an `all_reduce` that goes on while other methods are called. Collective.

        Without the capability `asynchronous-collectives`, as by default, it is done before this returns.

        Args:
            values: One tensor per local replica, of one shape and dtype on all replicas; nobody may change
                them before the result is there.
            op: Reduction.

        Returns:
            Function that waits for the result of `all_reduce`. Local; to be called once.
        """
        reduced = self.all_reduce(values, op)
        return lambda: reduced

    def all_gather_async(self, values: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Starts an all-gather over all replicas, as `all_reduce_async` does a reduction. Collective.

        Args:
            values: One tensor per local replica, of one shape and dtype on all replicas.

        Returns:
            Function that waits for the result, to be called once: for each local replica the tensors of all
            replicas, stacked, shape `[replicas, *shape]`. Local.
        """
        gathered = self.compute(_all_gather, values)
        return lambda: gathered

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


AVERAGED: tuple[StatePart, ...] = ("trainable", "statistics")
"""State that averages of weights over steps hold: trainable weights and moving statistics."""
_UPDATED: tuple[StateKind, ...] = ("trainable", "optimizer", "loss-scale")
"""State that `apply_gradients` changes."""


def _divide(replica: Replica, gradients: Sequence[Tensor], divisor: Tensor) -> list[Tensor]:
    """Gradients of any shapes, divided by a scalar, in their dtypes. Local."""
    return [gradient / replica.ops.cast(divisor, gradient.dtype) for gradient in gradients]


def _average_trainable(replica: Replica) -> None:
    average_state(replica, ("trainable",))


def _read_averaged(replica: Replica) -> Tensor:
    return replica.read(AVERAGED)


def _move_average(replica: Replica, average: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """Computation that moves an average, one vector, towards the replica's weights. Local."""
    (vector,) = average
    return [vector + replica.ops.cast(weight, vector.dtype) * (replica.read(AVERAGED) - vector)]


def _all_gather(replica: Replica, tensor: Tensor) -> Tensor:
    """Computation that all-gathers one tensor of any shape."""
    return replica.all_gather(tensor)


def _all_reduce(replica: Replica, tensor: Tensor, *, static: ReduceOp) -> Tensor:
    """Computation that all-reduces one tensor of any shape; `static` is the reduction."""
    return replica.all_reduce(tensor, static)
