"""Fully sharded torch replicas, by torch's `fully_shard` (FSDP2): each has a part of every weight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from isotrain.adapters.common import sharding
from isotrain.adapters.torch.comm.base import Wait
from isotrain.adapters.torch.comm.ddp import DDPCommunicator
from isotrain.adapters.torch.replica.group import TorchReplicaGroup
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.adapters.torch.trainer.native import NativeTrainer
from isotrain.adapters.torch.trainer.state import Section, in_place
from isotrain.plugin import (
    DATA,
    SHARD,
    BackendConfig,
    Batch,
    DeviceMesh,
    ProcessContext,
    SpecError,
    StateKind,
    Subgroups,
)


class FSDPCommunicator(DDPCommunicator):
    """Weights are joined and gradients averaged by torch, unit by unit, while passes run."""

    def __init__(
        self, backend_config: BackendConfig, context: ProcessContext, unit_bytes: int
    ) -> None:
        """Joins the process group.

        Args:
            backend_config: What the plan resolved.
            context: This process's place.
            unit_bytes: Of weights that are joined together, where the modules allow it.
        """
        super().__init__(backend_config, context)
        self._unit_bytes = unit_bytes
        self._mesh = self._device_mesh(context.device_mesh)

    def _device_mesh(self, mesh: DeviceMesh) -> TorchDeviceMesh | None:
        """The replicas with the same parts, and those with all of them; None: the latter are all there are.

        Its process groups are made here, as torch's own would not have the timeout of the run.
        """
        if mesh.size(DATA) == 1:
            return None
        own = [self._group_among(mesh.groups(axis)) for axis in (DATA, SHARD)]
        return TorchDeviceMesh.from_group(
            own,
            self._device.type,
            torch.tensor(mesh.groups(SHARD)),
            mesh_dim_names=("replicate", "shard"),
        )

    def _group_among(self, subgroups: Subgroups) -> Any:
        """This replica's process group, which may be of it alone; all replicas make each."""
        made = [dist.new_group(list(subgroup), timeout=self._timeout) for subgroup in subgroups]
        return next(
            group for group, subgroup in zip(made, subgroups, strict=True) if self.rank in subgroup
        )

    def wrap(self, trainer: ReplicaTrainer) -> None:
        if not isinstance(trainer, NativeTrainer):
            raise SpecError(
                "model: {torch: ...} is for torch's own models, and the function returned one of Keras. Give"
                " it as the model of every framework: `model: module:function`."
            )
        _require_shardable(trainer.trainable)
        self._broadcast_initial_values(trainer)
        whole = {
            parameter for parameter in trainer.model.parameters() if not parameter.requires_grad
        }
        seen = set(whole)
        for unit in fsdp_modules(trainer.model, self._unit_bytes):
            own = set(unit.parameters()) - seen
            seen |= own
            _require_single_dtype(own)
            fully_shard(unit, mesh=self._mesh, ignored_params=whole)
        trainer.rebind_parameters()
        self._model = trainer.model
        self.module = trainer.loss_module.forward

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)

    def reduce_loss_async(self, share: torch.Tensor) -> Wait:
        return self.all_reduce_mean_async(share)

    def wait_gradients(self) -> None:
        """All are there once the backward pass is through."""
        return

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def unshard(self) -> None:
        """Joins all weights, which stay so until `reshard`."""
        for unit in self._fsdp_units():
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def reshard(self) -> None:
        """Leaves this replica its part of the weights, but for those of the unit that computes."""
        for unit in self._fsdp_units():
            unit.reshard()
            unit.set_reshard_after_forward(unit is not self._model, recurse=False)

    def _fsdp_units(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]


def _require_shardable(weights: Mapping[str, torch.Tensor]) -> None:
    """Refuses what `fully_shard` does not take apart.

    Raises:
        SpecError: There is such a weight.
    """
    sharding.require_all_sharded([name for name, each in weights.items() if not each.dim()])
    odd = [name for name, each in weights.items() if not (each.numel() and each.is_contiguous())]
    if odd:
        raise SpecError(
            f"strategy sharded: {', '.join(odd)}: stage=3 takes weights apart that have numbers, which follow"
            " each other row by row: no empty ones, and none in another memory format (channels_last). Leave"
            " these out, or take stage 1 or 2."
        )


def _require_single_dtype(unit: Iterable[torch.Tensor]) -> None:
    """Refuses weights of several types that would be joined together.

    Raises:
        SpecError: There are such.
    """
    types = {str(each.dtype).removeprefix("torch.") for each in unit}
    if len(types) > 1:
        sharding.require_single_dtype(types)


def fsdp_modules(model: nn.Module, unit_bytes: int) -> list[nn.Module]:
    """The modules whose weights are joined together, the model, which has the rest, at the end.

    A module with weights of its own is not taken apart from its children: it may use theirs without calling
    them. Nor is a model in which modules share weights.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) > len(list(model.parameters())):
        return [model]
    return [*_parts(model, unit_bytes), model]


def _parts(module: nn.Module, unit_bytes: int) -> Iterator[nn.Module]:
    if next(module.parameters(recurse=False), None) is not None:
        return
    for child in module.children():
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        small = sum(parameter.nbytes for parameter in child.parameters()) <= unit_bytes
        parts = [] if is_called and small else list(_parts(child, unit_bytes))
        yield from parts
        if is_called and not parts and any(p.requires_grad for p in child.parameters()):
            yield child


class FSDPReplicaGroup(TorchReplicaGroup):
    """One replica, which has a part of every weight between steps."""

    communicator: FSDPCommunicator
    _is_unsharded = False
    """Whether all weights are here, as after `unshard_weights`."""

    def synchronous_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        self.reshard_weights()
        return super().synchronous_step(batch, learning_rate)

    def reshard_weights(self) -> None:
        if self._is_unsharded:
            self._is_unsharded = False
            self._snapshot_guard.release()
            self.communicator.reshard()

    def unshard_weights(self) -> None:
        self._is_unsharded = True
        self.communicator.unshard()

    def _sections(self) -> dict[StateKind, Section]:
        """As of any replica; while all weights are here, all of them."""
        return super()._sections() | {"trainable": Section(self._weights, self._write_weight)}

    def _weights(self) -> dict[str, torch.Tensor]:
        if not self._is_unsharded:
            return self.trainer.trainable
        now = dict(self.trainer.model.named_parameters())
        return {name: now[name] for name in self.trainer.trainable}

    def _write_weight(self, name: str, value: torch.Tensor) -> None:
        for weights in (self._weights(), self.trainer.trainable):
            in_place(weights).write(name, value)
