"""What one torch process does of one step of a staged run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from isotrain.adapters.stage_models import StageChunk, StageLosses, StageModel
from isotrain.adapters.torch.stage_exchange import StageExchange
from isotrain.plugin import Pass, Slice, StageWork, Transfer

TransferKey = tuple[int, tuple[tuple[int, ...], ...]]
"""A chunk, and the shapes of the inputs."""


@dataclass
class Stages:
    """What stays from step to step.

    Attributes:
        model: The model, cut.
        exchange: With the other stages.
        loss: Of its chunks.
        told: Of which transfers, for inputs of which shapes, the receiver knows what comes: what it is like.
    """

    model: StageModel
    exchange: StageExchange
    loss: StageLosses
    told: dict[TransferKey, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Kept:
    """Of a forward pass, for its backward pass."""

    received: list[torch.Tensor]
    given: list[torch.Tensor]
    loss: torch.Tensor


class TorchStageWork(StageWork):
    """Passes through the chunks of this process.

    Attributes:
        share: The sum of the weighted losses so far, which is all of it once all passes are done.
    """

    def __init__(
        self,
        stages: Stages,
        pieces: Sequence[Slice],
        still: Callable[[], AbstractContextManager[None]],
        seen: Callable[[Slice, Any], None],
    ) -> None:
        """Takes a step up.

        Args:
            stages: What stays.
            pieces: The micro-batches.
            still: Within it, statistics stay as they are.
            seen: Is told the predictions for a micro-batch.
        """
        self._stages = stages
        self._pieces = pieces
        self._still = still
        self._seen = seen
        self._kept: dict[tuple[int, int], _Kept] = {}
        self.share: torch.Tensor = torch.zeros((), dtype=torch.float64)

    def forward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        piece, chunk = self._pieces[work.micro_batch], self._chunk(work)
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in received]
        known = self._stages.model.inputs(piece.inputs) | dict(
            zip(chunk.takes, leaves, strict=True)
        )
        if piece.count:
            known = chunk(known, training=True)
        else:
            with self._still():
                known = chunk(known, training=True)
        given = chunk.crossing(known)
        loss, predictions = self._stages.loss.of(chunk, known, piece.targets)
        loss = loss * piece.weight
        if chunk is self._stages.model.chunks[-1]:
            self._seen(piece, predictions)
        self.share = self.share + loss.detach().double()
        self._kept[work.chunk, work.micro_batch] = _Kept(leaves, given, loss)
        return [each.detach() for each in given]

    def _chunk(self, work: Pass) -> StageChunk:
        return self._stages.model.chunks[work.chunk]

    def backward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        kept = self._kept.pop((work.chunk, work.micro_batch))
        differentiable = [each for each in kept.given if each.is_floating_point()]
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = [
            (root, gradient)
            for root, gradient in zip(differentiable, received, strict=True)
            if root.requires_grad
        ]
        if kept.loss.requires_grad:
            pairs.append((kept.loss, None))
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        return [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf in kept.received
            if leaf.requires_grad
        ]

    def send(self, transfer: Transfer, tensors: list[torch.Tensor]) -> None:
        exchange, key = self._stages.exchange, self._key(transfer)
        if transfer.direction == "forward" and key not in self._stages.told:
            self._stages.told[key] = [torch.empty_like(each, device="meta") for each in tensors]
            for each in tensors:
                exchange.send_like(each, transfer.destination, transfer)
        for each in tensors:
            exchange.send(each, transfer.destination, transfer)

    def receive(self, transfer: Transfer) -> list[torch.Tensor]:
        exchange = self._stages.exchange
        found = [exchange.receive(each, transfer.source) for each in self._expected(transfer)]
        if transfer.direction == "backward":  # gradients of what has arrived, then
            exchange.finish_sending(transfer.answered)
        return found

    def _expected(self, transfer: Transfer) -> list[torch.Tensor]:
        """Tensors like those that come."""
        if transfer.direction == "backward":
            kept = self._kept[transfer.chunk, transfer.micro_batch]
            return [each for each in kept.given if each.is_floating_point()]
        key, told = self._key(transfer), self._stages.told
        if key not in told:
            takes = self._stages.model.chunks[transfer.chunk].takes
            device = self._pieces_device()
            exchange = self._stages.exchange
            told[key] = [exchange.receive_like(transfer.source, device) for _ in takes]
        return told[key]

    def _key(self, transfer: Transfer) -> TransferKey:
        """What both ends know, and what decides the shapes: the inputs, which every stage has."""
        inputs = self._stages.model.inputs(self._pieces[transfer.micro_batch].inputs)
        return transfer.chunk, tuple(tuple(each.shape) for each in inputs.values())

    def _pieces_device(self) -> torch.device:
        return next(iter(self._stages.model.inputs(self._pieces[0].inputs).values())).device
