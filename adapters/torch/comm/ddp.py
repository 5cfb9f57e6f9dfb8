"""The exchange of `torch-ddp`: torch's process group and DistributedDataParallel."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.variable_init import broadcast_initial_values
from isotrain.adapters.torch.comm.base import Wait
from isotrain.adapters.torch.comm.loss_in_gradients import LossInGradients
from isotrain.adapters.torch.comm.powersgd import PowerSGD
from isotrain.adapters.torch.comm.process_group import ProcessGroupCommunicator, start_process_group
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
_BUCKETS_REBUILT = "buckets_rebuilt"
_POWERSGD = "powersgd/"
_BUCKET_MIB = 1
"""At which DistributedDataParallel closes its first bucket, unless it is told another size of buckets."""
_NO_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False,
    "init_sync": False,
}
"""That nothing is broadcast, in the words of the torch that is installed: 2.13 warns of the old ones."""


class _NamingUnused(DistributedDataParallel):
    """Names the weights that got no gradient in the step before, where torch raises with their numbers.

    Attributes:
        names: The weights' names, by the identity of their parameters.
    """

    names: dict[int, str]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        try:
            return super().forward(*inputs, **options)
        except RuntimeError as error:
            found = private_api.UNREDUCED_ERROR.search(str(error))
            if found is None:
                raise
            trained = [each for each in self.module.parameters() if each.requires_grad]
            missing = (trained[int(place)] for place in found[1].split())
            raise _unused([self.names[id(each)] for each in missing]) from error


def _unused(names: Sequence[str]) -> SpecError:
    return SpecError(
        f"model: {', '.join(names)}: the loss does not depend on {len(names)} trainable"
        " weights. Freeze them or leave them out; or, where they take part now and then, set"
        " backend_options: {torch-ddp: {find_unused_parameters: true}}."
    )


class DDPCommunicator(ProcessGroupCommunicator):
    """Gradients are averaged by DistributedDataParallel while the backward pass runs."""

    def __init__(self, backend_config: BackendConfig, context: ProcessContext) -> None:
        start_process_group(backend_config, context)
        self.rank = context.rank
        self.replicas = context.world_size
        self._device_ids = [context.local_rank] if backend_config.device == "gpu" else None
        self._options = ddp_options(backend_config.options)
        self._timeout = timedelta(seconds=backend_config.timeout)
        self._in_parts = SHARD in context.device_mesh.sizes
        self._process_groups: dict[tuple[int, ...], Any] = {}
        self._mean: torch.Tensor | None = None
        self._powersgd: PowerSGD | None = None
        self._has_rebuilt_buckets = False
        self._had_rebuilt_buckets = False
        self._waits_for_all = False
        self._is_reduced = False

    def wrap(self, trainer: ReplicaTrainer) -> None:
        self._trainer = trainer
        self._loss_in_gradients = False
        self._broadcast_initial_values(trainer)
        if self._in_parts:
            self.module = trainer.loss_module.forward
            return
        unused, static = (
            self._options[name] for name in ("find_unused_parameters", "static_graph")
        )
        self._expects_all = self._waits_for_all = not (unused or static)
        # Buckets are filled in the order in which gradients come, or else in that of parameters, of which
        # the first are exchanged last.
        as_they_come = static or not unused
        self._loss = LossInGradients(
            trainer.loss_module,
            self._device,
            _widest(trainer),
            1 + trainer.may_ignore_padding,
            at_end=as_they_come,
        )
        # Two terms have no order; of more, all replicas' sums shall have that of a loop by hand.
        bucket = min(_BUCKET_MIB, self._options.get("bucket_cap_mb", _BUCKET_MIB))
        self._loss_in_gradients = (
            self.replicas <= 2
            or self._device.type != "cpu"
            or (as_they_come and self._loss.keeps_summation_order(self.replicas, bucket))
        )
        self.module = _NamingUnused(
            self._loss if self._loss_in_gradients else trainer.loss_module,
            device_ids=self._device_ids,
            **_NO_BROADCAST,
            **self._options,
        )
        self.module.names = {id(each): name for name, each in trainer.trainable.items()}

    def _broadcast_initial_values(self, trainer: ReplicaTrainer) -> None:
        """Gives all replicas what replica 0 has: DDP itself takes neither all types nor all layouts."""
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

        return wait

    def reduce_loss_async(self, share: torch.Tensor) -> Wait:
        """Lets the loss travel with the gradients, where it can."""
        if not self._loss_in_gradients:
            return self.all_reduce_mean_async(share)
        scale = self._trainer.loss_scale()  # the update may change it

        def wait() -> torch.Tensor:
            assert self._mean is not None
            return self._mean if scale == 1.0 else self._mean / scale

        return wait

    def wait_gradients(self) -> None:
        self._mean = self._loss.taken()
        self._has_rebuilt_buckets = self._is_reduced = True
        if self._expects_all:
            self._expects_all = False
            self._require_gradients()

    def require_all_reduced(self) -> None:
        if self._waits_for_all and self._is_reduced:
            self._require_gradients()

    def _require_gradients(self) -> None:
        """Looks whether DDP waits in vain: it has then not averaged what it keeps beside them either.

        Raises:
            SpecError: A weight got no gradient.
        """
        missing = [trait.layer for trait in self._trainer.without_gradient()]
        if missing:
            raise _unused(missing)

    def reduce_scatter(
        self, vector: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        """Each sends every other its part: Gloo's own reduce-scatter moves twice as much."""
        members = self._members(subgroups)
        rows = vector.new_empty((len(members), sizes[members.index(self.rank)]))
        self._swap(members, vector.contiguous().split(list(sizes)), list(rows))
        total, *others = rows
        for row in others:
            total += row
        return total

    def all_gather_shards(
        self, shard: torch.Tensor, sizes: Sequence[int], subgroups: Subgroups = ()
    ) -> torch.Tensor:
        members, whole = self._members(subgroups), shard.new_empty(sum(sizes))
        self._swap(members, [shard.contiguous()] * len(members), whole.split(list(sizes)))
        return whole

    def _members(self, subgroups: Subgroups) -> Sequence[int]:
        """The replicas of the own set; without any, all."""
        return (
            (local_subgroup(self.rank, subgroups) or (self.rank,))
            if subgroups
            else range(self.replicas)
        )

    def _swap(
        self,
        members: Sequence[int],
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
    ) -> None:
        """Gives each of some replicas one tensor, and receives one of each, itself included; empty ones stay.

        Gloo takes no tensor of a GPU for that: they go by way of the host.
        """
        own = members.index(self.rank)
        received[own].copy_(sent[own])
        by_host = self._device.type != "cpu" and dist.get_backend() == dist.Backend.GLOO
        found = [torch.empty_like(each, device="cpu") for each in received] if by_host else received
        given = [each.cpu() for each in sent] if by_host else sent
        others = [(place, other) for place, other in enumerate(members) if place != own]
        _complete(
            [
                *(dist.P2POp(dist.isend, given[i], r) for i, r in others if given[i].numel()),
                *(dist.P2POp(dist.irecv, found[i], r) for i, r in others if found[i].numel()),
            ]
        )
        for place, _ in others if by_host else []:
            received[place].copy_(found[place])

    def send_receive(self, value: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        if destination == source == self.rank:
            return value.clone()
        result = torch.empty_like(value)
        transfers = [
            dist.P2POp(dist.isend, value.contiguous(), destination),
            dist.P2POp(dist.irecv, result, source),
        ]
        _complete(transfers)
        return result

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
        """This replica's process group among those of the parts; all replicas make each, once."""
        for subgroup in map(tuple, subgroups):
            if len(subgroup) > 1 and subgroup not in self._process_groups:
                self._process_groups[subgroup] = dist.new_group(
                    list(subgroup), timeout=self._timeout
                )
        return self._process_groups.get(local_subgroup(self.rank, subgroups))

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        if method == "topk" or (method == "bf16" and self._device.type == "cpu"):
            return False  # torch has no hook for the one, and lets the other run on NCCL only
        self._loss_in_gradients = False  # the hook would compress the loss too
        if method == "powersgd":
            self._powersgd = PowerSGD(rank, start)
        state, hook = _communication_hook(method, self._powersgd)
        self.module.register_comm_hook(state, hook)  # type: ignore[attr-defined]
        return True

    def state(self) -> dict[str, torch.Tensor]:
        """Whether DDP has arranged its buckets, which it does by the first backward pass; and PowerSGD's."""
        buckets_rebuilt = torch.tensor(self._has_rebuilt_buckets or self._had_rebuilt_buckets)
        own = {} if self._powersgd is None else self._powersgd.read()
        return {
            _BUCKETS_REBUILT: buckets_rebuilt,
            **{_POWERSGD + name: value for name, value in own.items()},
        }

    def write_state(self, name: str, value: torch.Tensor) -> None:
        """Sets one of these; buckets that are arranged stay so."""
        if name == _BUCKETS_REBUILT:
            self._had_rebuilt_buckets = bool(value)
        elif self._powersgd is not None and name.startswith(_POWERSGD):
            self._powersgd.write(name.removeprefix(_POWERSGD), value, self._device)
        else:
            super().write_state(name, value)

    def warm_up(self) -> AbstractContextManager[Any] | None:
        """Where a run goes on whose buckets were arranged: in others, sums round in another way."""
        if self._has_rebuilt_buckets or not self._had_rebuilt_buckets:
            return None
        return nullcontext() if self._powersgd is None else self._powersgd.set_aside()

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self._device), "sum").item()

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu" if self._device_ids is None else f"cuda:{self._device_ids[0]}")

    def close(self) -> None:
        """Leaves the process group, after DDP is gone: its threads must not outlive the group."""
        self.barrier()
        self.__dict__.pop("module", None)
        self._process_groups.clear()
        gc.collect()
        dist.destroy_process_group()


def _complete(transfers: list[dist.P2POp]) -> None:
    """Sends and receives; returns when all is done."""
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()


def _widest(trainer: ReplicaTrainer) -> torch.dtype:
    """The type in which the loss travels: the weights', and never one of 16 bits."""
    wide = any(weight.dtype == torch.float64 for weight in trainer.trainable.values())
    return torch.float64 if wide else torch.float32


def _communication_hook(method: CompressionMethod, powersgd: PowerSGD | None) -> tuple[Any, Any]:
    """One of torch's own communication hooks, and its state."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if powersgd is not None:
        return powersgd.state, powersgd.hook
    return None, getattr(default_hooks, f"{method}_compress_hook")


def ddp_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """DistributedDataParallel's options: what a good hand-written script sets, and the spec's."""
    return {
        "gradient_as_bucket_view": True,
        "static_graph": False,
        "find_unused_parameters": False,
        **given,
    }
