"""Fully sharded replicas of native models by torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from isotrain.adapters.common import weight_sharding
from isotrain.adapters.torch.comm.base import Wait
from isotrain.adapters.torch.comm.ddp import DDPCommunicator
from isotrain.adapters.torch.replica.replica_group import TorchReplicaGroup
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
    """Communicator of a model under `fully_shard`: torch gathers weights and reduce-scatters gradients."""

    def __init__(
        self, backend_config: BackendConfig, context: ProcessContext, unit_bytes: int
    ) -> None:
        """Joins the process group. Collective.

        Args:
            backend_config: Backend configuration of the plan.
            context: Context of this process.
            unit_bytes: Size (bytes) of the weights in one FSDP unit, as far as module borders allow.
        """
        super().__init__(backend_config, context)
        self._unit_bytes = unit_bytes
        self._mesh = self._device_mesh(context.device_mesh)

    def _device_mesh(self, mesh: DeviceMesh) -> TorchDeviceMesh | None:
        """2-D mesh for hybrid sharding: replicas with equal shards x shards; None if it would be 1-D.

        Its process groups are made here, as those that torch makes would not have the timeout of the run.
        """
        if mesh.size(DATA) == 1:
            return None
        groups = [self._new_group(mesh.groups(axis)) for axis in (DATA, SHARD)]
        return TorchDeviceMesh.from_group(
            groups,
            self._device.type,
            torch.tensor(mesh.groups(SHARD)),
            mesh_dim_names=("replicate", "shard"),
        )

    def _new_group(self, subgroups: Subgroups) -> Any:
        """Creates the process groups of all subgroups, and returns this replica's. Collective."""
        groups = [dist.new_group(list(subgroup), timeout=self._timeout) for subgroup in subgroups]
        return next(
            group
            for group, subgroup in zip(groups, subgroups, strict=True)
            if self.rank in subgroup
        )

    def wrap(self, trainer: ReplicaTrainer) -> None:
        if not isinstance(trainer, NativeTrainer):
            raise SpecError(
                "model: {torch: ...} is for native torch modules, and the function returned a Keras model."
                " Give it as the model of every framework: `model: module:function`."
            )
        _require_shardable(trainer.trainable)
        self._broadcast_initial_values(trainer)
        ignored = {
            parameter for parameter in trainer.model.parameters() if not parameter.requires_grad
        }
        seen = set(ignored)
        for unit in fsdp_modules(trainer.model, self._unit_bytes):
            unit_parameters = set(unit.parameters()) - seen
            seen |= unit_parameters
            _require_single_dtype(unit_parameters)
            fully_shard(unit, mesh=self._mesh, ignored_params=ignored)
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
        """Does nothing: `fully_shard` has reduced all gradients when the backward pass ends. Local."""
        return

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def unshard(self) -> None:
        """All-gathers all weights, which stay unsharded until `reshard`. Collective."""
        for unit in self._fsdp_units():
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def reshard(self) -> None:
        """Frees all weights but this replica's shards; units reshard after forward passes again. Local."""
        for unit in self._fsdp_units():
            unit.reshard()
            unit.set_reshard_after_forward(unit is not self._model, recurse=False)

    def _fsdp_units(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]


def _require_shardable(weights: Mapping[str, torch.Tensor]) -> None:
    """Refuses weights that `fully_shard` cannot shard.

    Raises:
        SpecError: A weight is a scalar, empty or not contiguous.
    """
    weight_sharding.require_all_sharded([name for name, each in weights.items() if not each.dim()])
    unsupported = [
        name for name, each in weights.items() if not (each.numel() and each.is_contiguous())
    ]
    if unsupported:
        raise SpecError(
            f"strategy sharded: {', '.join(unsupported)}: stage=3 shards contiguous weights only: no"
            " empty ones, and none in another memory format (channels_last). Freeze or remove these, or use"
            " stage 1 or 2."
        )


def _require_single_dtype(unit: Iterable[torch.Tensor]) -> None:
    """Refuses weights of several dtypes in one FSDP unit.

    Raises:
        SpecError: They have several dtypes.
    """
    dtypes = {str(each.dtype).removeprefix("torch.") for each in unit}
    if len(dtypes) > 1:
        weight_sharding.require_single_dtype(dtypes)


def fsdp_modules(model: nn.Module, unit_bytes: int) -> list[nn.Module]:
    """Modules to call `fully_shard` on; the model itself, which has the remaining weights, comes last.

    A module that has weights itself forms one unit with its children: it may use theirs without calling
    them. So does a model in which modules share weights.

    Args:
        model: Model to shard.
        unit_bytes: Size (bytes) up to which a module's weights form one unit.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) > len(list(model.parameters())):
        return [model]
    return [*_submodule_units(model, unit_bytes), model]


def _submodule_units(module: nn.Module, unit_bytes: int) -> Iterator[nn.Module]:
    if next(module.parameters(recurse=False), None) is not None:
        return
    for child in module.children():
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        is_small = sum(parameter.nbytes for parameter in child.parameters()) <= unit_bytes
        units = [] if is_called and is_small else list(_submodule_units(child, unit_bytes))
        yield from units
        if is_called and not units and any(p.requires_grad for p in child.parameters()):
            yield child


class FSDPReplicaGroup(TorchReplicaGroup):
    """Replica group of a native model whose weights are sharded between steps (ZeRO stage 3, FSDP2)."""

    communicator: FSDPCommunicator
    _is_unsharded = False
    """Whether this replica has all weights, as after `unshard_weights`."""

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
        """State by kind; `trainable` is this replica's shards, or all weights while they are unsharded."""
        return super()._sections() | {"trainable": Section(self._weights, self._write_weight)}

    def _weights(self) -> dict[str, torch.Tensor]:
        """Trainable weights by name: DTensors, or tensors of unsharded shapes while unsharded."""
        if not self._is_unsharded:
            return self.trainer.trainable
        parameters = dict(self.trainer.model.named_parameters())
        return {name: parameters[name] for name in self.trainer.trainable}

    def _write_weight(self, name: str, value: torch.Tensor) -> None:
        """Overwrites a weight by a value of its unsharded shape or of this replica's shard."""
        for weights in (self._weights(), self.trainer.trainable):
            in_place(weights).write(name, value)
