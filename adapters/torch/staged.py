"""The group of one torch process of a staged run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from isotrain.adapters import stage_profile
from isotrain.adapters.stage_rules import own_weights, require_ready
from isotrain.adapters.torch import private
from isotrain.adapters.torch.exchange import flat_mean
from isotrain.adapters.torch.group import TorchReplicaGroup
from isotrain.adapters.torch.stage_exchange import StageExchange
from isotrain.adapters.torch.stage_models import cut_model
from isotrain.adapters.torch.stage_work import Stages, TorchStageWork
from isotrain.adapters.torch.state import Section
from isotrain.adapters.torch.tensors import kept
from isotrain.plugin import (
    MODEL_STATE,
    Action,
    Batch,
    ModelCut,
    ModelProfile,
    Setting,
    StateInfo,
    StateKind,
    Taken,
    TrainingSpec,
    execute_stage,
)

_WEIGHTS: tuple[StateKind, ...] = ("trainable", "non-trainable")


class StagedGroup(TorchReplicaGroup):
    """One stage of one replica, which has all weights and keeps its own up to date."""

    exchange: StageExchange

    def __init__(
        self,
        spec: TrainingSpec,
        setting: Setting,
        device: torch.device,
        connect: Callable[[], StageExchange],
        cut: ModelCut,
    ) -> None:
        """Builds the model, joins the others, and keeps the optimizer's slots of its own stage.

        Args:
            spec: What to train.
            setting: What the plan resolved.
            device: Where this stage lives.
            connect: Joins the other processes; called once the model is built.
            cut: Of the model.
        """
        self._is_joined = True
        self._taken: list[Taken] = []
        super().__init__(spec, setting, device, connect)
        program = self.program
        program.set_split(True)  # into micro-batches
        late = [metric.name for metric in self._measures.training if metric.is_late]
        require_ready(late)
        model, loss, self._compare = cut_model(program, spec, cut)
        self._stages = Stages(model, self.exchange, loss)
        self._homes = model.homes(self.exchange.stages)
        trainable = list(program.trainable.values())
        places = own_weights(self._homes, trainable, self.exchange.stage)
        self.keep_slots_of([places])
        self.statistics = [each for each in program.statistics if self._is_own(each)]

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return self._homes.get(id(tensor), 0) == self.exchange.stage

    @property
    def _is_last(self) -> bool:
        return self.exchange.stage == (len(self._stages.model.chunks) - 1) % self.exchange.stages

    def staged_step(
        self, batch: Batch, learning_rate: float, actions: Sequence[Sequence[Action]]
    ) -> torch.Tensor:
        self._set_learning_rate(learning_rate)
        self.program.zero_gradients()
        pieces, stage = batch.slices[0], self.exchange.stage
        if self._is_joined:
            for piece in itertools.islice((each for each in pieces if each.count), 1):
                self._compare(piece.inputs)
        self.part_weights()
        still = functools.partial(kept, self.statistics)
        work = TorchStageWork(self._stages, pieces, still, self._measures.train)
        self._taken = execute_stage(actions[stage], stage, work)
        self.exchange.finish_all()
        self._update_own()
        if self.statistics and self.replicas > 1:
            flat_mean(self.exchange, self.statistics, sum(piece.weight for piece in pieces))
        return self.exchange.over_all(work.share) / self.replicas

    def _update_own(self) -> None:
        """Averages this stage's gradients over the replicas, clips them with all others, and applies them."""
        gradients = [each.grad for each in self.program.updated if each.grad is not None]
        if self.replicas > 1:
            flat_mean(self.exchange, gradients, 1.0)
        norm = None
        if self._spec.clip is not None and self._spec.clip.global_norm is not None:
            nothing = torch.zeros_like(self.program.updated[0].flatten()[0])
            norms = torch.stack([nothing, *private.foreach_norm(gradients)])
            norm = self.exchange.over_stages(torch.linalg.vector_norm(norms) ** 2).sqrt()
        self._hold.wait_after_forward()
        self.program.apply(norm)

    def refuses_one(self, batch: Batch) -> str | None:
        return super().refuses_one(batch) if self._is_joined else None

    def join_stages(self) -> None:
        if self._is_joined:
            return
        with torch.no_grad():
            for tensor in self._weights().values():
                if not tensor.untyped_storage().nbytes():
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                self.exchange.from_stage(tensor, self._homes.get(id(tensor), 0))
        self._is_joined = True

    def part_weights(self) -> None:
        if self._is_joined:
            self._is_joined = False
            self._hold.let_go()
            self._let_go()

    def last_actions(self) -> Sequence[Taken]:
        return self._taken

    def profile_layers(self, batch: Batch) -> ModelProfile:
        model = self._stages.model
        given = model.inputs(batch.slices[0][0].inputs)
        return stage_profile.profiled(model.calls(), given, self._passes)

    def _passes(
        self, compute: stage_profile.Compute, given: Sequence[torch.Tensor], trained: Sequence[Any]
    ) -> tuple[Callable[[], list[torch.Tensor]], Callable[[], None]]:
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in given]

        def forward() -> list[torch.Tensor]:
            found = [each.detach() for each in compute(*leaves)]
            self.synchronise_device()
            return found

        def both() -> None:
            roots = [each for each in compute(*leaves) if each.requires_grad]
            if roots:
                torch.autograd.grad(
                    roots, [*leaves, *trained], list(map(torch.ones_like, roots)), allow_unused=True
                )
            self.synchronise_device()

        return forward, both

    def remarks(self) -> list[str]:
        return super().remarks() + self._stages.model.described(self.exchange.stages)

    def evaluation_step(self, batch: Batch) -> None:
        if self._is_last:
            super().evaluation_step(batch)

    def _total(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.exchange.over_all(tensor)

    @property
    def is_alone(self) -> bool:
        return self.replicas * self.exchange.stages == 1

    def largest(self, numbers: Sequence[float]) -> list[float]:
        found = self.exchange.largest_of_all(self.tensor(np.array(numbers, np.float64)))
        return [float(number) for number in self.numpy(found)]

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        found = super().describe_state(kinds, replica=replica)
        if self._is_joined:
            return found
        weights = self._weights()
        return {
            name: info.held_alone() if name in weights else info for name, info in found.items()
        }

    def lives_elsewhere(self, name: str) -> bool:
        """Also of a weight of another stage, unless all have been joined."""
        weight = self.program.trainable.get(name, self.program.frozen.get(name))
        moved = not self._is_joined and weight is not None and not self._is_own(weight)
        return moved or super().lives_elsewhere(name)

    def _sections(self) -> dict[StateKind, Section]:
        """As of one replica; between steps, the weights of this stage alone."""
        whole = super()._sections()
        return whole | {
            kind: Section(functools.partial(self._read_here, whole[kind]), whole[kind].write)
            for kind in _WEIGHTS
        }

    def _read_here(self, section: Section) -> dict[str, torch.Tensor]:
        here = self._here()
        return {name: tensor for name, tensor in section.read().items() if name in here}

    def _here(self) -> dict[str, torch.Tensor]:
        """The weights that this process has as they are now."""
        weights = self._weights()
        if self._is_joined:
            return weights
        return {name: tensor for name, tensor in weights.items() if self._is_own(tensor)}

    def _frozen_here(self) -> list[torch.Tensor]:
        return [tensor for name, tensor in self._here().items() if name in self.program.frozen]

    def _weights(self) -> dict[str, torch.Tensor]:
        return {**self.program.trainable, **self.program.frozen}

    def _let_go(self) -> None:
        """Gives the memory of other stages' weights back; `join_stages` gets them again."""
        for tensor in self._weights().values():
            if self._is_own(tensor):
                continue
            if not tensor.untyped_storage().resizable():  # the memory is NumPy's
                tensor.data = torch.empty_like(tensor)
            tensor.untyped_storage().resize_(0)
