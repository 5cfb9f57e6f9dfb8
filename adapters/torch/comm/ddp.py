"""The communicator of `torch-ddp`: torch's process group and DistributedDataParallel.

Bucketed all-reduce that overlaps with the backward pass: Li et al., "PyTorch Distributed" (VLDB 2020, arXiv
2006.15704).
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.gpu import replica_device
from isotrain.adapters.torch.base.initial_broadcast import broadcast_initial_values
from isotrain.adapters.torch.comm.base import Wait
from isotrain.adapters.torch.comm.bucketed_module import BucketedModule
from isotrain.adapters.torch.comm.late_mean import PendingMean
from isotrain.adapters.torch.comm.loss_in_gradients import LossInGradients
from isotrain.adapters.torch.comm.powersgd import PowerSGD
from isotrain.adapters.torch.comm.process_group import (
    ProcessGroupCommunicator,
    abandon_process_group,
    destroy_process_group,
    sends_by_host,
    start_process_group,
)
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import (
    SHARD,
    BackendConfig,
    CompressionMethod,
    ProcessContext,
    SpecError,
    Subgroups,
    local_subgroup,
)

_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_CAP = "bucket_cap_mb"
_BUCKETS_REBUILT = "buckets_rebuilt"
_POWERSGD = "powersgd/"
_BUCKET_MIB = 1
"""Size (MiB) at which DistributedDataParallel closes its first bucket, unless `bucket_cap_mb` is less."""
_LATER_MIB = 25
"""Size (MiB) at which it closes the others, unless `bucket_cap_mb` is set, which then holds for all."""
_NO_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False,
    "init_sync": False,
}
"""Arguments that turn all broadcasts off, as the installed torch names them: 2.13 warns of the old names."""


class _DDPNamingUnused(DistributedDataParallel):
    """DistributedDataParallel whose error for unused parameters has their names, not their indices.

    Attributes:
        names: Weight names by the `id` of their parameters.
    """

    names: dict[int, str]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        try:
            return super().forward(*inputs, **options)
        except RuntimeError as error:
            match = private_api.UNREDUCED_ERROR.search(str(error))
            if match is None:
                raise
            trained = [each for each in self.module.parameters() if each.requires_grad]
            missing = (trained[int(index)] for index in match[1].split())
            raise _unused_error([self.names[id(each)] for each in missing]) from error


def _unused_error(names: Sequence[str]) -> SpecError:
    return SpecError(
        f"model: {', '.join(names)}: the loss does not depend on {len(names)} trainable"
        " weights. Freeze or remove them; or, if only some steps use them, set"
        " backend_options: {torch-ddp: {find_unused_parameters: true}}."
    )


class DDPCommunicator(ProcessGroupCommunicator):
    """Communicator whose gradients DistributedDataParallel averages in buckets in the backward pass."""

    def __init__(self, backend_config: BackendConfig, context: ProcessContext) -> None:
        start_process_group(backend_config, context)
        self.rank = context.rank
        self.replicas = context.world_size
        self._device = replica_device(backend_config, context)
        self._options = ddp_options(backend_config.options)
        self._timeout = timedelta(seconds=backend_config.timeout)
        self._is_sharded = SHARD in context.device_mesh.sizes
        self._process_groups: dict[tuple[int, ...], Any] = {}
        self._loss_mean: torch.Tensor | None = None
        self._powersgd: PowerSGD | None = None
        self._has_rebuilt_buckets = False
        self._restored_rebuilt_buckets = False
        self._waits_for_all = False
        self._is_reduced = False

    def wrap(self, trainer: ReplicaTrainer) -> None:
        self._trainer = trainer
        if not self.is_shared:
            self._broadcast_initial_values(trainer)
        self._wrap_module(trainer)

    def rewrap(self, trainer: ReplicaTrainer) -> None:
        del self.module, self._loss
        gc.collect()  # hooks of the old DDP must not see gradients of the new one
        self._has_rebuilt_buckets = self._restored_rebuilt_buckets = self._is_reduced = False
        self._wrap_module(trainer)

    def _wrap_module(self, trainer: ReplicaTrainer) -> None:
        """Wraps the loss module by DistributedDataParallel, for the weights that require gradients."""
        _WRAPPED.add(self)
        self._loss_in_gradients = False
        if self._is_sharded:
            self.module = trainer.loss_module.forward
            return
        finds_unused, is_static = (
            self._options[name] for name in ("find_unused_parameters", "static_graph")
        )
        self._expects_all = self._waits_for_all = not (finds_unused or is_static)
        # Buckets are filled in the order in which gradients become ready, or else in that of the parameters,
        # of which the first are all-reduced last.
        in_ready_order = is_static or not finds_unused
        self._loss = LossInGradients(
            trainer.loss_module,
            self._device,
            _loss_dtype(trainer),
            1 + trainer.may_ignore_padding,
            at_end=in_ready_order,
        )
        # Two terms have no order; for more, sums shall have the order of a hand-written loop.
        first_bucket_mib = min(_BUCKET_MIB, self._options.get(_CAP, _BUCKET_MIB))
        self._loss_in_gradients = (
            self.replicas <= 2
            or self._device.type != "cpu"
            or (
                in_ready_order and self._loss.keeps_summation_order(self.replicas, first_bucket_mib)
            )
        )
        module = self._loss if self._loss_in_gradients else trainer.loss_module
        if any(map(private_api.is_fake, trainer.trainable.values())):
            limits = [self._options[_CAP]] if _CAP in self._options else [_BUCKET_MIB, _LATER_MIB]
            self.module = BucketedModule(module, limits, in_ready_order=in_ready_order)
            return
        self.module = _DDPNamingUnused(
            module,
            device_ids=None if self._device.type == "cpu" else [self._device],
            **_NO_BROADCAST,
            **self._options,
        )
        self.module.names = {id(each): name for name, each in trainer.trainable.items()}

    def _broadcast_initial_values(self, trainer: ReplicaTrainer) -> None:
        """Broadcasts replica 0's tensors: DDP's own broadcast takes neither all dtypes nor all layouts."""
        broadcast_initial_values(
            trainer.tensors(), self._device, lambda vector: dist.broadcast(vector, 0)
        )

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.module.no_sync()  # type: ignore[attr-defined]

    def all_reduce_mean_async(self, scalar: torch.Tensor) -> Wait:
        self._is_reduced = False
        total = scalar.clone()
        work = dist.all_reduce(total, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return total.div_(self.replicas)

        return PendingMean(wait, work.is_completed, total)

    def reduce_loss_async(self, share: torch.Tensor) -> Wait:
        """Sends the loss, scalar or `[2]`, with the gradients (`LossInGradients`), or alone. Collective."""
        if not self._loss_in_gradients:
            return self.all_reduce_mean_async(share)
        scale = self._trainer.loss_scale()  # the update may change it

        def wait() -> torch.Tensor:
            assert self._loss_mean is not None
            return self._loss_mean if scale == 1.0 else self._loss_mean / scale

        return wait

    def wait_gradients(self) -> None:
        if isinstance(self.module, BucketedModule):
            self.module.all_reduce()
        self._loss_mean = self._loss.pop_mean()
        self._has_rebuilt_buckets = self._is_reduced = True
        if self._expects_all:
            self._expects_all = False
            self._require_gradients()

    def require_all_reduced(self) -> None:
        if self._waits_for_all and self._is_reduced:
            self._require_gradients()

    def _require_gradients(self) -> None:
        """Refuses weights without gradients: DDP waits for them, and has not averaged their bucket either.

        Raises:
            SpecError: A weight got no gradient.
        """
        missing = [trait.layer for trait in self._trainer.without_gradient()]
        if missing:
            raise _unused_error(missing)

    def reduce_scatter(
        self, vector: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        """Reduce-scatter of a vector by an all-to-all of shards. Collective.

        Gloo's own reduce-scatter moves twice as much.
        """
        members = self._members(subgroups)
        rows = vector.new_empty((len(members), sizes[members.index(self.rank)]))
        self._all_to_all(members, vector.contiguous().split(list(sizes)), list(rows))
        total, *others = rows
        for row in others:
            total += row
        return total

    def all_gather_shards(
        self, shard: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        members, gathered = self._members(subgroups), shard.new_empty(sum(sizes))
        self._all_to_all(members, [shard.contiguous()] * len(members), gathered.split(list(sizes)))
        return gathered

    def _members(self, subgroups: Subgroups) -> Sequence[int]:
        """Ranks of this replica's subgroup; all ranks if there are no subgroups."""
        return (
            (local_subgroup(self.rank, subgroups) or (self.rank,))
            if subgroups
            else range(self.replicas)
        )

    def _all_to_all(
        self,
        members: Sequence[int],
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
    ) -> None:
        """All-to-all by point-to-point transfers; empty tensors are not sent.

        Args:
            members: Ranks that take part, this one included.
            sent: Tensor for each member, any shapes.
            received: Output tensor for each member, of the shape and dtype that it sends; overwritten.
        """
        index = members.index(self.rank)
        received[index].copy_(sent[index])
        by_host = sends_by_host(self._device)
        outputs = (
            [torch.empty_like(each, device="cpu") for each in received] if by_host else received
        )
        inputs = [each.cpu() for each in sent] if by_host else sent
        peers = [(i, peer) for i, peer in enumerate(members) if i != index]
        _run_p2p(
            [
                *(dist.P2POp(dist.isend, inputs[i], r) for i, r in peers if inputs[i].numel()),
                *(dist.P2POp(dist.irecv, outputs[i], r) for i, r in peers if outputs[i].numel()),
            ]
        )
        for i, _ in peers if by_host else []:
            received[i].copy_(outputs[i])

    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        if destination == source == self.rank:
            return value.clone()
        sent = value.cpu() if sends_by_host(value.device) else value
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        transfers = [
            dist.P2POp(dist.isend, sent.contiguous(), destination),
            dist.P2POp(dist.irecv, received, source),
        ]
        _run_p2p(transfers)
        return received.to(value.device)

    def all_reduce_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        result, process_group = value.clone(), self._process_group(subgroups)
        if process_group is not None:
            dist.all_reduce(result, group=process_group)
        return result

    def broadcast_within(self, value: torch.Tensor, subgroups: Subgroups) -> torch.Tensor:
        result, process_group = value.clone(), self._process_group(subgroups)
        if process_group is not None:
            dist.broadcast(result, local_subgroup(self.rank, subgroups)[0], group=process_group)
        return result

    def _process_group(self, subgroups: Subgroups) -> Any:
        """This replica's process group; None if it is in no subgroup. Collective: all create all, once."""
        for subgroup in map(tuple, subgroups):
            if len(subgroup) > 1 and subgroup not in self._process_groups:
                self._process_groups[subgroup] = dist.new_group(
                    list(subgroup), timeout=self._timeout
                )
        return self._process_groups.get(local_subgroup(self.rank, subgroups))

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        if method == "topk" or (method == "bf16" and self._device.type == "cpu"):
            return False  # torch has no hook for topk, and runs bf16's on NCCL only
        self._loss_in_gradients = False  # the hook would compress the loss too
        if method == "powersgd":
            self._powersgd = PowerSGD(rank, start)
        state, hook = _communication_hook(method, self._powersgd)
        self.module.register_comm_hook(state, hook)  # type: ignore[attr-defined]
        return True

    def state(self) -> dict[str, torch.Tensor]:
        """`buckets_rebuilt`, a bool scalar, true after DDP's first backward pass; PowerSGD's state. Local."""
        buckets_rebuilt = torch.tensor(self._has_rebuilt_buckets or self._restored_rebuilt_buckets)
        powersgd = {} if self._powersgd is None else self._powersgd.read()
        return {
            _BUCKETS_REBUILT: buckets_rebuilt,
            **{_POWERSGD + name: value for name, value in powersgd.items()},
        }

    def write_state(self, name: str, value: torch.Tensor) -> None:
        """Restores one entry of `state`, in its shape; buckets rebuilt already stay so. Local."""
        if name == _BUCKETS_REBUILT:
            self._restored_rebuilt_buckets = bool(value)
        elif self._powersgd is not None and name.startswith(_POWERSGD):
            self._powersgd.write(name.removeprefix(_POWERSGD), value, self._device)
        else:
            super().write_state(name, value)

    def warm_up(self) -> AbstractContextManager[Any] | None:
        """Context of a warm-up where a resumed run had rebuilt buckets, which round sums otherwise. Local."""
        if self._has_rebuilt_buckets or not self._restored_rebuilt_buckets:
            return None
        return nullcontext() if self._powersgd is None else self._powersgd.paused()

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self._device), "sum").item()

    def close(self) -> None:
        """Destroys the process group after DDP, whose threads must not outlive it. Collective."""
        self.barrier()
        self._free_module()
        if self.is_shared:
            return
        gc.collect()
        destroy_process_group()

    def _free_module(self) -> None:
        self.__dict__.pop("module", None)
        if not self.is_shared:
            self._process_groups.clear()


_WRAPPED = weakref.WeakSet[DDPCommunicator]()
"""Communicators of this process with a DDP, which keeps the process group."""


def abandon_communicators() -> None:
    """Destroys each DDP and the process group, without waiting for other members. Local.

    Gloo closes its connections, by which the others see that this process has left, once nothing refers to
    the group. A DDP does, and a callback may keep its session.
    """
    for communicator in tuple(_WRAPPED):
        communicator._free_module()
    if _WRAPPED:
        gc.collect()
    abandon_process_group()


def _run_p2p(transfers: list[dist.P2POp]) -> None:
    """Runs point-to-point transfers as one batch, and waits for all.

    Receives come first: Gloo announces them on the socket to the peer, where they would wait behind sends.
    """
    transfers = sorted(transfers, key=lambda transfer: transfer.op is dist.isend)
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()


def _loss_dtype(trainer: ReplicaTrainer) -> torch.dtype:
    """Dtype in which the loss is all-reduced: that of the weights, but never one of 16 bits."""
    has_float64 = any(weight.dtype == torch.float64 for weight in trainer.trainable.values())
    return torch.float64 if has_float64 else torch.float32


def _communication_hook(method: CompressionMethod, powersgd: PowerSGD | None) -> tuple[Any, Any]:
    """One of torch's DDP communication hooks: its state, and the hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if powersgd is not None:
        return powersgd.state, powersgd.hook
    return None, getattr(default_hooks, f"{method}_compress_hook")


def ddp_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """DistributedDataParallel's arguments: those of a good hand-written script, and the spec's options."""
    return {
        "gradient_as_bucket_view": True,
        "static_graph": False,
        "find_unused_parameters": False,
        **options,
    }
