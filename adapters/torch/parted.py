"""The group of one torch process of a fully sharded run, over any exchange."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from isotrain.adapters.torch.bucketed import BucketedGradients
from isotrain.adapters.torch.build import build_parted
from isotrain.adapters.torch.exchange import Exchange, flat_mean
from isotrain.adapters.torch.group import TorchReplicaGroup, replica_device
from isotrain.adapters.torch.parted_program import PartedProgram
from isotrain.adapters.torch.parted_weights import PartedWeights
from isotrain.adapters.torch.shares import Shares
from isotrain.plugin import Batch, ProcessContext, Setting, TrainingSpec


class PartedGroup(TorchReplicaGroup):
    """One replica, which has a part of every weight and slot between steps."""

    program: PartedProgram

    def __init__(
        self,
        spec: TrainingSpec,
        setting: Setting,
        context: ProcessContext,
        connect: Callable[[], Exchange],
        unit_bytes: int,
    ) -> None:
        """Builds the model, joins the others, and takes the weights apart.

        Args:
            spec: What to train.
            setting: What the plan resolved.
            context: This process's place.
            connect: Joins the other replicas; called once the model is built.
            unit_bytes: Of weights that are joined together, where layers allow it.
        """
        super().__init__(spec, setting, replica_device(setting, context), connect)
        self.program.take_apart(self.exchange, context.mesh, unit_bytes)
        self._rate = None

    def _build(self, spec: TrainingSpec, device: torch.device) -> PartedProgram:
        return build_parted(spec, device)

    @property
    def _weights(self) -> PartedWeights:
        return self.program.parted

    def synchronised_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        """Keeps gradients whole from one micro-batch to the next, and takes them over in the last."""
        self.part_weights()
        program, weights = self.program, self._weights
        bucketed = BucketedGradients(program, self._replica, weights.reduction)
        shares = Shares(batch.slices[0], program, self.exchange)
        program.zero_gradients()
        share: torch.Tensor | None = None
        last = len(shares.pieces) - 1
        for index in range(last + 1):
            with bucketed.while_they_come() if index == last else nullcontext():
                share = self._backward(shares, index, program.objective, share)
        weights.forget()
        assert share is not None
        mean = self.exchange.begin_mean(share)
        self.update_own([weights.in_order(bucketed.kept)], learning_rate, None)
        if self.statistics:
            flat_mean(self.exchange, self.statistics, shares.weight)
        return mean()

    def part_weights(self) -> None:
        if self._weights.is_whole:
            self._hold.let_go()
            self._weights.let_go()

    def gather_weights(self) -> None:
        self._weights.gather()

    def keep_gradients(self) -> bool:
        return False
