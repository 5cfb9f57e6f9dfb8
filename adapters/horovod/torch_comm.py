"""Communicator of torch replicas over Horovod.

Ring all-reduce with tensor fusion: Sergeev and Del Balso, "Horovod", arXiv 1802.05799.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from isotrain.adapters.horovod import private_api, runtime
from isotrain.adapters.torch.base.initial_broadcast import broadcast_initial_values
from isotrain.adapters.torch.base.tensors import separate_gradients
from isotrain.adapters.torch.comm.base import Communicator, Wait
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import (
    SHARD,
    BackendConfig,
    CompressionMethod,
    IsotrainError,
    ProcessContext,
    ReduceOp,
    Subgroups,
    local_subgroup,
)

_OPERATIONS = {"sum": hvd.Sum, "mean": hvd.Average, "max": hvd.Max}
OVERLAP_BYTES = 1 << 20
"""Size (bytes) of all gradients from which on their all-reduce overlaps with the backward pass."""
_NEVER = 1 << 30
"""Backward passes until Horovod's hooks all-reduce: outside of a synchronous step they must not."""


class HorovodCommunicator(Communicator):
    """Communicator whose gradients Horovod averages, with its fusion and compression."""

    def __init__(self, context: ProcessContext, backend_config: BackendConfig) -> None:
        self._process_sets = runtime.ProcessSets(hvd, context, backend_config)
        self.replicas = hvd.size()
        self.rank = hvd.rank()
        self._options = backend_config.options
        self._is_sharded = SHARD in context.device_mesh.sizes

    def wrap(self, trainer: ReplicaTrainer) -> None:
        """Broadcasts the weights of replica 0; registers hooks, unless weights are sharded. Collective."""
        tensors = trainer.tensors()
        device = next(iter(tensors.values())).device
        if not self.is_shared:
            broadcast_initial_values(
                tensors,
                device,
                lambda vector: hvd.broadcast_(vector, 0, name="isotrain.first_values"),
            )
        self._forward = trainer.loss_module.forward
        if not self._is_sharded:
            self._reducer = self._full_reducer = _make_reducer(trainer.trainable, self._options)
        self._accumulating = False

    def rewrap(self, trainer: ReplicaTrainer) -> None:
        """All-reduces what gradients are left in one call; the hooks of all wait meanwhile. Local."""
        trained = {n: w for n, w in trainer.trainable.items() if n not in trainer.session_frozen}
        self._reducer = self._full_reducer
        if len(trained) < len(trainer.trainable):
            self._reducer = _SingleCallReducer(trained, _compression(self._options))

    def module(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Forward pass (shapes: see `LossModule`); Horovod all-reduces its gradients outside `no_sync`."""
        if not self._accumulating:
            self._reducer.begin_backward()
        return self._forward(inputs, targets)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which Horovod's hooks wait for further backward passes. Local."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def all_reduce_mean_async(self, scalar: torch.Tensor) -> Wait:
        """Starts the all-reduce of the mean of a scalar or a vector `[2]`. Collective.

        It is a sum: Horovod would fuse a mean with the gradients, and reorder their sums.
        """
        handle = hvd.allreduce_async_(_sendable_copy(scalar), name="isotrain.loss", op=hvd.Sum)
        return lambda: hvd.synchronize(handle).div_(self.replicas).to(scalar.dtype)

    def reduce_loss_async(self, share: torch.Tensor) -> Wait:
        """All-reduces the loss, scalar or `[2]`, with the gradients, unless groups reorder it. Collective."""
        return self._reducer.add_scalar(share) or self.all_reduce_mean_async(share)

    def wait_gradients(self) -> None:
        """Waits until every `.grad` is the mean over all replicas; zero for unused parameters. Collective."""
        self._reducer.wait()

    def all_reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """One Horovod all-reduce, any shape. Collective."""
        name = tensor_name(f"all_reduce.{op}", value)
        return hvd.allreduce(to_sendable(value), name=name, op=_OPERATIONS[op]).to(value.dtype)

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        """One Horovod all-gather along a new first axis: shape `[replicas, *value.shape]`. Collective."""
        row = to_sendable(value).unsqueeze(0)
        return hvd.allgather(row, name=tensor_name("all_gather", value)).to(value.dtype)

    def reduce_scatter(
        self, vector: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        """One Horovod all-to-all of a vector, and a local sum; returns shape `[sizes[index]]`."""
        process_set = self._process_set(subgroups)
        if process_set is None:
            return vector.clone()
        rows, _ = hvd.alltoall(
            to_sendable(vector),
            torch.tensor(sizes, dtype=torch.int32),
            name=tensor_name(f"reduce_scatter.{process_set.process_set_id}", vector),
            process_set=process_set,
        )
        return rows.view(len(sizes), sizes[process_set.rank()]).sum(0).to(vector.dtype)

    def all_gather_shards(
        self, shard: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        """One Horovod all-gather of vectors of any sizes; returns shape `[sum(sizes)]`. Collective."""
        process_set = self._process_set(subgroups)
        if process_set is None:
            return shard.clone()
        name = tensor_name(f"all_gather_shards.{process_set.process_set_id}", shard)
        gathered = hvd.allgather(to_sendable(shard), name=name, process_set=process_set)
        return gathered.to(shard.dtype)

    def _process_set(self, subgroups: Subgroups) -> Any:
        """Process set of this replica's subgroup, or of all replicas without subgroups; None if alone."""
        return self._process_sets.local(subgroups or [range(self.replicas)])

    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        """Sends a tensor of any shape by one all-to-all in which all rows but one are empty. Collective."""
        splits = torch.zeros(self.replicas, dtype=torch.int32)
        splits[destination] = 1
        row = to_sendable(value).unsqueeze(0)
        received, counts = hvd.alltoall(row, splits, name=tensor_name("send_receive", value))
        _check_one_sender(counts.tolist(), source)
        return received.squeeze(0).to(value.dtype)

    def all_reduce_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        """One Horovod all-reduce sum in this replica's process set, any shape. Collective."""
        process_set = self._process_sets.local(subgroups)
        if process_set is None:
            return value.clone()
        name = tensor_name(f"all_reduce_within.{process_set.process_set_id}", value)
        total = hvd.allreduce(to_sendable(value), name=name, op=hvd.Sum, process_set=process_set)
        return total.to(value.dtype)

    def broadcast_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        """One Horovod broadcast in this replica's process set, any shape. Collective."""
        process_set = self._process_sets.local(subgroups)
        if process_set is None:
            return value.clone()
        name = tensor_name(f"broadcast_within.{process_set.process_set_id}", value)
        root = local_subgroup(self.rank, subgroups)[0]
        received = hvd.broadcast(to_sendable(value), root, name=name, process_set=process_set)
        return received.to(value.dtype)

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        """Horovod has compression to float16 (`fp16`) only. Local."""
        if method == "fp16":
            self._reducer.compress(hvd.Compression.fp16)
        return method == "fp16"

    def barrier(self) -> None:
        """One Horovod barrier. Collective."""
        hvd.barrier()

    def close(self) -> None:
        """Waits for all replicas, then shuts Horovod down. Collective."""
        hvd.barrier()
        if not self.is_shared:
            runtime.stop(hvd)


class _OverlappingReducer:
    """All-reduce of gradients of any shape in the backward pass, by hooks of `hvd.DistributedOptimizer`."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], compression: Any, groups: int | None
    ) -> None:
        self._weights = list(parameters.values())
        self._groups = groups
        self._scalar: torch.Tensor | None = None
        self._optimizer = hvd.DistributedOptimizer(
            private_api.ParameterStub([{"params": self._weights}]),
            named_parameters=list(parameters.items()),
            compression=_Contiguous(compression),
            op=hvd.Average,
            groups=groups,
            backward_passes_per_step=_NEVER,
        )

    def compress(self, compression: Any) -> None:
        """Changes the compression."""
        private_api.set_compression(self._optimizer, _Contiguous(compression))

    def begin_backward(self) -> None:
        """Makes the hooks all-reduce in the next backward pass."""
        self._optimizer.set_backward_passes_per_step(1)

    def add_scalar(self, scalar: torch.Tensor) -> Wait | None:
        """All-reduces a scalar as one more gradient, which Horovod fuses with those ready at the same time.

        Returns:
            Function that waits for the mean; None if gradients go in groups, whose order of sums it would
            change.
        """
        if self._groups is not None:
            return None
        self._scalar = _sendable_copy(scalar)
        return lambda: hvd.synchronize(self._scalar_handle).to(scalar.dtype)

    def wait(self) -> None:
        """Starts the scalar's all-reduce with the last gradients, and waits for all gradients.

        Started before the backward pass, it would be sent alone: no gradient is ready then.
        """
        if self._scalar is not None:
            self._scalar_handle = hvd.allreduce_async_(
                self._scalar, name="isotrain.loss", op=hvd.Average
            )
            self._scalar = None
        private_api.set_backward_passes(self._optimizer, _NEVER)
        self._optimizer.synchronize()
        separate_gradients(self._weights)  # gradients that shared memory do so again


class _SingleCallReducer:
    """One grouped all-reduce of gradients of any shape after the backward pass: fast for a small model."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], compression: Any) -> None:
        self._parameters = list(parameters.values())
        self._compression = compression
        self._scalar = torch.zeros(())

    def compress(self, compression: Any) -> None:
        """Changes the compression."""
        self._compression = compression

    def begin_backward(self) -> None:
        """Does nothing: there are no hooks."""

    def add_scalar(self, scalar: torch.Tensor) -> Wait | None:
        """Adds a scalar, which is not compressed, to the next all-reduce."""
        self._scalar = _sendable_copy(scalar)
        return lambda: self._scalar.to(scalar.dtype)

    def wait(self) -> None:
        """All-reduces the gradients, zeros for unused parameters, and the scalar, in place."""
        compress, decompress = self._compression.compress, self._compression.decompress
        gradients = [
            _dense(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for parameter in self._parameters
        ]
        sent, contexts = zip(*map(compress, gradients), strict=True)
        hvd.grouped_allreduce_([self._scalar, *sent], name="isotrain.step", op=hvd.Average)
        for parameter, mean, context in zip(self._parameters, sent, contexts, strict=True):
            parameter.grad = decompress(mean, context)


def _make_reducer(
    parameters: Mapping[str, torch.Tensor], options: Mapping[str, Any]
) -> _OverlappingReducer | _SingleCallReducer:
    """Makes the faster reducer for parameters of this size in bytes, unless the options set `groups`."""
    compression = _compression(options)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    if "groups" not in options and size < OVERLAP_BYTES:
        return _SingleCallReducer(parameters, compression)
    return _OverlappingReducer(parameters, compression, options.get("groups"))


def _compression(options: Mapping[str, Any]) -> Any:
    """Horovod's compression by the options of the backend."""
    return getattr(hvd.Compression, options.get("compression", "none"))


class _Contiguous:
    """Compression that first makes gradients contiguous, as Horovod requires; some have other strides."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression
        self.decompress = compression.decompress

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Compresses a tensor of any shape (to float16 or as it is); also returns what `decompress` needs."""
        compressed: tuple[torch.Tensor, Any] = self._compression.compress(tensor.contiguous())
        return compressed


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Dense, contiguous gradient of the same shape: grouped all-reduces take no sparse tensors."""
    return gradient.to_dense() if gradient.is_sparse else gradient.contiguous()


def _sendable_copy(scalar: torch.Tensor) -> torch.Tensor:
    """Copy of a scalar that Horovod can send, in memory allocated before the backward pass.

    A mean allocated after it would lie in memory of an activation that was just freed. A loop that keeps the
    losses of all steps, as many do, would so fragment the memory of activations, and allocate more each step.
    """
    return to_sendable(scalar).clone()


def to_sendable(value: torch.Tensor) -> torch.Tensor:
    """Detached, contiguous tensor for Horovod, any shape; bfloat16, which it lacks, becomes float32."""
    value = value.detach().contiguous()
    return value.float() if value.dtype == torch.bfloat16 else value


def tensor_name(kind: str, value: torch.Tensor) -> str:
    """Name of a collective: Horovod pairs tensors by name, and caches the negotiation of name and shape."""
    return f"isotrain.{kind}.{value.dtype}"


def _check_one_sender(received_rows: list[int], source: int) -> None:
    """Checks that exactly the expected replica sent a tensor to this one.

    Args:
        received_rows: Number of tensors received from each replica.
        source: Replica that must have sent one.

    Raises:
        IsotrainError: The destinations and sources of the replicas do not match.
    """
    expected = [int(replica == source) for replica in range(len(received_rows))]
    if received_rows != expected:
        senders = [replica for replica, rows in enumerate(received_rows) if rows]
        raise IsotrainError(
            f"send_receive: expected a tensor from replica {source}, received from {senders}. Every"
            " replica's destination must name it as its source."
        )
