"""Fully sharded torch replicas, by torch's `fully_shard` (FSDP2): each has a part of every weight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from isotrain.adapters import cuts
from isotrain.adapters.torch.ddp import DDPExchange
from isotrain.adapters.torch.exchange import Wait
from isotrain.adapters.torch.group import TorchReplicaGroup
from isotrain.adapters.torch.native_program import NativeProgram
from isotrain.adapters.torch.program import Program
from isotrain.adapters.torch.state import Section, in_place
from isotrain.plugin import (
    DATA,
    SHARD,
    Batch,
    Mesh,
    Parts,
    ProcessContext,
    Setting,
    SpecError,
    StateKind,
)


class FullyShardedExchange(DDPExchange):
    """Weights are joined and gradients averaged by torch, unit by unit, while passes run."""

    def __init__(self, setting: Setting, context: ProcessContext, unit_bytes: int) -> None:
        """Joins the process group.

        Args:
            setting: What the plan resolved.
            context: This process's place.
            unit_bytes: Of weights that are joined together, where the modules allow it.
        """
        super().__init__(setting, context)
        self._unit_bytes = unit_bytes
        self._mesh = self._device_mesh(context.mesh)

    def _device_mesh(self, mesh: Mesh) -> DeviceMesh | None:
        """The replicas with the same parts, and those with all of them; None: the latter are all there are.

        Its process groups are made here, as torch's own would not have the timeout of the run.
        """
        if mesh.size(DATA) == 1:
            return None
        own = [self._group_among(mesh.groups(axis)) for axis in (DATA, SHARD)]
        return DeviceMesh.from_group(
            own,
            self._device.type,
            torch.tensor(mesh.groups(SHARD)),
            mesh_dim_names=("replicate", "shard"),
        )

    def _group_among(self, parts: Parts) -> Any:
        """This replica's process group, which may be of it alone; all replicas make each."""
        made = [dist.new_group(list(part), timeout=self._timeout) for part in parts]
        return next(group for group, part in zip(made, parts, strict=True) if self.rank in part)

    def attach(self, program: Program) -> None:
        if not isinstance(program, NativeProgram):
            raise SpecError(
                "model: {torch: ...} is for torch's own models, and the function returned one of Keras. Give"
                " it as the model of every framework: `model: module:function`."
            )
        _require_apt(program.trainable)
        self._take_first(program)
        whole = {
            parameter for parameter in program.model.parameters() if not parameter.requires_grad
        }
        seen = set(whole)
        for unit in units(program.model, self._unit_bytes):
            own = set(unit.parameters()) - seen
            seen |= own
            _require_one_type(own)
            fully_shard(unit, mesh=self._mesh, ignored_params=whole)
        program.take_up_weights()
        self._model = program.model
        self.module = program.objective.forward

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)

    def begin_loss(self, share: torch.Tensor) -> Wait:
        return self.begin_mean(share)

    def finish_gradients(self) -> None:
        """All are there once the backward pass is through."""
        return

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def gather(self) -> None:
        """Joins all weights, which stay so until `part`."""
        for unit in self._sharded_units():
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def part(self) -> None:
        """Leaves this replica its part of the weights, but for those of the unit that computes."""
        for unit in self._sharded_units():
            unit.reshard()
            unit.set_reshard_after_forward(unit is not self._model, recurse=False)

    def _sharded_units(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]


def _require_apt(weights: Mapping[str, torch.Tensor]) -> None:
    """Refuses what `fully_shard` does not take apart.

    Raises:
        SpecError: There is such a weight.
    """
    cuts.require_divided([name for name, each in weights.items() if not each.dim()])
    odd = [name for name, each in weights.items() if not (each.numel() and each.is_contiguous())]
    if odd:
        raise SpecError(
            f"strategy sharded: {', '.join(odd)}: stage=3 takes weights apart that have numbers, which follow"
            " each other row by row: no empty ones, and none in another memory format (channels_last). Leave"
            " these out, or take stage 1 or 2."
        )


def _require_one_type(unit: Iterable[torch.Tensor]) -> None:
    """Refuses weights of several types that would be joined together.

    Raises:
        SpecError: There are such.
    """
    types = {str(each.dtype).removeprefix("torch.") for each in unit}
    if len(types) > 1:
        cuts.require_one_type(types)


def units(model: nn.Module, unit_bytes: int) -> list[nn.Module]:
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


class FullyShardedGroup(TorchReplicaGroup):
    """One replica, which has a part of every weight between steps."""

    exchange: FullyShardedExchange
    _is_whole = False
    """Whether all weights are here, as after `gather_weights`."""

    def synchronised_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        self.part_weights()
        return super().synchronised_step(batch, learning_rate)

    def part_weights(self) -> None:
        if self._is_whole:
            self._is_whole = False
            self._hold.let_go()
            self.exchange.part()

    def gather_weights(self) -> None:
        self._is_whole = True
        self.exchange.gather()

    def _sections(self) -> dict[StateKind, Section]:
        """As of any replica; while all weights are here, all of them."""
        return super()._sections() | {"trainable": Section(self._weights, self._write_weight)}

    def _weights(self) -> dict[str, torch.Tensor]:
        if not self._is_whole:
            return self.program.trainable
        now = dict(self.program.model.named_parameters())
        return {name: now[name] for name in self.program.trainable}

    def _write_weight(self, name: str, value: torch.Tensor) -> None:
        for weights in (self._weights(), self.program.trainable):
            in_place(weights).write(name, value)
