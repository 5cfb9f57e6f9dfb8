"""Torch replicas tied together by Horovod."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from isotrain.adapters.horovod import private_api, runtime
from isotrain.adapters.torch.base.variable_init import broadcast_initial_values
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
"""From this size of all gradients on, each starts to travel as soon as the backward pass has it."""
_NEVER = 1 << 30
"""Backward passes until Horovod's hooks exchange: outside of a synchronised step they must not."""


class HorovodCommunicator(Communicator):
    """Gradients are averaged by Horovod, with its fusion and compression; the update is the trainer's."""

    def __init__(self, context: ProcessContext, backend_config: BackendConfig) -> None:
        parts = runtime.sharding_process_sets(context.device_mesh)
        self._process_sets = runtime.ProcessSets(hvd, context, backend_config, parts)
        self.replicas = hvd.size()
        self.rank = hvd.rank()
        self._options = backend_config.options
        self._in_parts = SHARD in context.device_mesh.sizes

    def wrap(self, trainer: ReplicaTrainer) -> None:
        """Broadcasts the weights of replica 0; registers Horovod's hooks, but where state lies in parts."""
        tensors = trainer.tensors()
        device = next(iter(tensors.values())).device
        broadcast_initial_values(
            tensors,
            device,
            lambda vector: hvd.broadcast_(vector, 0, name="isotrain.first_values"),
        )
        self._loss_module = trainer.loss_module
        if not self._in_parts:
            self._gradients = _gradient_reducer(trainer.trainable, self._options)
        self._accumulating = False

    def module(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """A forward pass whose backward pass Horovod's hooks shall follow."""
        if not self._accumulating:
            self._gradients.follow()
        return self._loss_module(inputs, targets)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves Horovod's hooks waiting for further backward passes."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def all_reduce_mean_async(self, scalar: torch.Tensor) -> Wait:
        """Starts a sum of its own, which Horovod never fuses with (and so reorders) the gradients."""
        handle = hvd.allreduce_async_(_own_copy(scalar), name="isotrain.loss", op=hvd.Sum)
        return lambda: hvd.synchronize(handle).div_(self.replicas).to(scalar.dtype)

    def reduce_loss_async(self, share: torch.Tensor) -> Wait:
        """Lets the loss travel with the gradients, unless they go in groups that it would reorder."""
        return self._gradients.take_along(share) or self.all_reduce_mean_async(share)

    def wait_gradients(self) -> None:
        """Leaves the mean of every gradient, zero where a parameter was not used."""
        self._gradients.finish()

    def all_reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """One Horovod all-reduce."""
        name = tensor_name(f"all_reduce.{op}", value)
        return hvd.allreduce(to_sendable(value), name=name, op=_OPERATIONS[op]).to(value.dtype)

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        """One Horovod all-gather along a new first axis."""
        row = to_sendable(value).unsqueeze(0)
        return hvd.allgather(row, name=tensor_name("all_gather", value)).to(value.dtype)

    def reduce_scatter(
        self, vector: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        """One Horovod all-to-all; the sum is this replica's own."""
        process_set = self._set_of(subgroups)
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
        """One Horovod all-gather, of parts of any sizes."""
        process_set = self._set_of(subgroups)
        if process_set is None:
            return shard.clone()
        name = tensor_name(f"all_gather_shards.{process_set.process_set_id}", shard)
        whole = hvd.allgather(to_sendable(shard), name=name, process_set=process_set)
        return whole.to(shard.dtype)

    def _set_of(self, subgroups: Subgroups) -> Any:
        """The process set of the own part; without any, of all replicas; None where it is alone."""
        return self._process_sets.own(subgroups or [range(self.replicas)])

    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        """One Horovod all-to-all in which all parts but one are empty."""
        splits = torch.zeros(self.replicas, dtype=torch.int32)
        splits[destination] = 1
        row = to_sendable(value).unsqueeze(0)
        received, counts = hvd.alltoall(row, splits, name=tensor_name("send_receive", value))
        _check_one_sender(counts.tolist(), source)
        return received.squeeze(0).to(value.dtype)

    def all_reduce_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        """One Horovod all-reduce in this replica's process set."""
        process_set = self._process_sets.own(subgroups)
        if process_set is None:
            return value.clone()
        name = tensor_name(f"all_reduce_within.{process_set.process_set_id}", value)
        total = hvd.allreduce(to_sendable(value), name=name, op=hvd.Sum, process_set=process_set)
        return total.to(value.dtype)

    def broadcast_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        """One Horovod broadcast in this replica's process set."""
        process_set = self._process_sets.own(subgroups)
        if process_set is None:
            return value.clone()
        name = tensor_name(f"broadcast_within.{process_set.process_set_id}", value)
        root = local_subgroup(self.rank, subgroups)[0]
        given = hvd.broadcast(to_sendable(value), root, name=name, process_set=process_set)
        return given.to(value.dtype)

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        """Horovod's own compression to float16; it has no other."""
        if method == "fp16":
            self._gradients.compress(hvd.Compression.fp16)
        return method == "fp16"

    def barrier(self) -> None:
        """One Horovod barrier."""
        hvd.barrier()

    def close(self) -> None:
        """Waits for all replicas, then shuts Horovod down."""
        hvd.barrier()
        runtime.stop(hvd)


class _Overlapped:
    """`hvd.DistributedOptimizer`: gradients travel during the backward pass, from its hooks."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], compression: Any, groups: int | None
    ) -> None:
        self._groups = groups
        self._scalar: torch.Tensor | None = None
        self._optimizer = hvd.DistributedOptimizer(
            private_api.ParameterStub([{"params": list(parameters.values())}]),
            named_parameters=list(parameters.items()),
            compression=_Contiguous(compression),
            op=hvd.Average,
            groups=groups,
            backward_passes_per_step=_NEVER,
        )

    def compress(self, compression: Any) -> None:
        """Changes the compression."""
        private_api.set_compression(self._optimizer, _Contiguous(compression))

    def follow(self) -> None:
        """Makes the hooks exchange in the next backward pass."""
        self._optimizer.set_backward_passes_per_step(1)

    def take_along(self, scalar: torch.Tensor) -> Wait | None:
        """Sends a scalar as one more gradient, which Horovod fuses with those that are ready with it.

        None where the gradients go in groups, whose order of sums it would change.
        """
        if self._groups is not None:
            return None
        self._scalar = _own_copy(scalar)
        return lambda: hvd.synchronize(self._sent).to(scalar.dtype)

    def finish(self) -> None:
        """Sends the scalar with the last gradients, and waits for the averages of all.

        Before the backward pass it would travel alone: no gradient is ready then.
        """
        if self._scalar is not None:
            self._sent = hvd.allreduce_async_(self._scalar, name="isotrain.loss", op=hvd.Average)
            self._scalar = None
        private_api.wait_for_backward_passes(self._optimizer, _NEVER)
        self._optimizer.synchronize()


class _Together:
    """One exchange after the backward pass: for a small model, where more take longer than they save."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], compression: Any) -> None:
        self._parameters = list(parameters.values())
        self._compression = compression
        self._scalar = torch.zeros(())

    def compress(self, compression: Any) -> None:
        """Changes the compression."""
        self._compression = compression

    def follow(self) -> None:
        """Nothing: no hooks are waiting."""

    def take_along(self, scalar: torch.Tensor) -> Wait | None:
        """Adds a scalar, which stays uncompressed, to the next exchange."""
        self._scalar = _own_copy(scalar)
        return lambda: self._scalar.to(scalar.dtype)

    def finish(self) -> None:
        """Exchanges all gradients, those of unused parameters as zeros, and the scalar, where they are."""
        compress, decompress = self._compression.compress, self._compression.decompress
        gradients = [
            _dense(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for parameter in self._parameters
        ]
        sent, contexts = zip(*map(compress, gradients), strict=True)
        hvd.grouped_allreduce_([self._scalar, *sent], name="isotrain.step", op=hvd.Average)
        for parameter, mean, context in zip(self._parameters, sent, contexts, strict=True):
            parameter.grad = decompress(mean, context)


def _gradient_reducer(
    parameters: Mapping[str, torch.Tensor], options: Mapping[str, Any]
) -> _Overlapped | _Together:
    """The faster way for a model of this size, unless the options name one."""
    compression = getattr(hvd.Compression, options.get("compression", "none"))
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    if "groups" not in options and size < OVERLAP_BYTES:
        return _Together(parameters, compression)
    return _Overlapped(parameters, compression, options.get("groups"))


class _Contiguous:
    """A compression of gradients that may lie as their weights do: Horovod takes contiguous tensors."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression
        self.decompress = compression.decompress

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What is sent, and what `decompress` needs."""
        found: tuple[torch.Tensor, Any] = self._compression.compress(tensor.contiguous())
        return found


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Horovod's groups hold no sparse tensors; a small model loses nothing by a dense one."""
    return gradient.to_dense() if gradient.is_sparse else gradient.contiguous()


def _own_copy(scalar: torch.Tensor) -> torch.Tensor:
    """What is exchanged in the place of a scalar, in memory taken before the backward pass.

    A mean made after it lies where an activation was that the step has just let go. Who keeps the losses of
    all steps, as many loops do, would keep these places from the next steps, which take new memory for each.
    """
    return to_sendable(scalar).clone()


def to_sendable(value: torch.Tensor) -> torch.Tensor:
    """What Horovod takes: contiguous, and bfloat16, which it does not know, as float32."""
    value = value.detach().contiguous()
    return value.float() if value.dtype == torch.bfloat16 else value


def tensor_name(kind: str, value: torch.Tensor) -> str:
    """Horovod pairs tensors by name, and negotiates a repeated name and shape only once."""
    return f"isotrain.{kind}.{value.dtype}"


def _check_one_sender(received_rows: list[int], source: int) -> None:
    """Checks that exactly the expected replica sent to this one.

    Args:
        received_rows: Per replica, how many tensors it sent.
        source: The replica from which one was expected.

    Raises:
        IsotrainError: Destinations and sources do not match over the replicas.
    """
    expected = [int(replica == source) for replica in range(len(received_rows))]
    if received_rows != expected:
        senders = [replica for replica, rows in enumerate(received_rows) if rows]
        raise IsotrainError(
            f"send_receive: a tensor was expected from replica {source}, and came from {senders}."
            " Every replica's destination must name it as its source."
        )
