"""What one torch process does of one step of a pipeline run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from isotrain.adapters.common.pipeline.interfaces import (
    PipelineChunk,
    PipelineLosses,
    PipelineModel,
)
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.plugin import Pass, Slice, StageWork, Transfer

TransferKey = tuple[int, tuple[tuple[int, ...], ...]]
"""A chunk, and the shapes of the inputs."""


@dataclass
class PipelineContext:
    """What stays from step to step.

    Attributes:
        model: The model, cut.
        communicator: With the other stages.
        loss: Of its chunks.
        known_specs: Of which transfers, for inputs of which shapes, the receiver knows what comes: what it
            is like.
    """

    model: PipelineModel
    communicator: PipelineCommunicator
    loss: PipelineLosses
    known_specs: dict[TransferKey, list[torch.Tensor]] = field(default_factory=dict)


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
        stages: PipelineContext,
        micro_batches: Sequence[Slice],
        still: Callable[[], AbstractContextManager[None]],
        seen: Callable[[Slice, Any], None],
    ) -> None:
        """Takes a step up.

        Args:
            stages: What stays.
            micro_batches: The micro-batches.
            still: Within it, statistics stay as they are.
            seen: Is told the predictions for a micro-batch.
        """
        self._stages = stages
        self._micro_batches = micro_batches
        self._still = still
        self._seen = seen
        self._kept: dict[tuple[int, int], _Kept] = {}
        self.share: torch.Tensor = torch.zeros((), dtype=torch.float64)

    def forward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        micro_batch, chunk = self._micro_batches[work.micro_batch], self._chunk(work)
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in received]
        known = self._stages.model.inputs(micro_batch.inputs) | dict(
            zip(chunk.input_keys, leaves, strict=True)
        )
        if micro_batch.count:
            known = chunk(known, training=True)
        else:
            with self._still():
                known = chunk(known, training=True)
        given = chunk.boundary_tensors(known)
        loss, predictions = self._stages.loss.of(chunk, known, micro_batch.targets)
        loss = loss * micro_batch.weight
        if chunk is self._stages.model.chunks[-1]:
            self._seen(micro_batch, predictions)
        self.share = self.share + loss.detach().double()
        self._kept[work.chunk, work.micro_batch] = _Kept(leaves, given, loss)
        return [each.detach() for each in given]

    def _chunk(self, work: Pass) -> PipelineChunk:
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
        communicator, key = self._stages.communicator, self._key(transfer)
        if transfer.direction == "forward" and key not in self._stages.known_specs:
            self._stages.known_specs[key] = [
                torch.empty_like(each, device="meta") for each in tensors
            ]
            for each in tensors:
                communicator.send_spec(each, transfer.destination, transfer)
        for each in tensors:
            communicator.send(each, transfer.destination, transfer)

    def receive(self, transfer: Transfer) -> list[torch.Tensor]:
        communicator = self._stages.communicator
        found = [communicator.receive(each, transfer.source) for each in self._expected(transfer)]
        if transfer.direction == "backward":  # gradients of what has arrived, then
            communicator.wait_sent(transfer.answered)
        return found

    def _expected(self, transfer: Transfer) -> list[torch.Tensor]:
        """Tensors like those that come."""
        if transfer.direction == "backward":
            kept = self._kept[transfer.chunk, transfer.micro_batch]
            return [each for each in kept.given if each.is_floating_point()]
        key, told = self._key(transfer), self._stages.known_specs
        if key not in told:
            takes = self._stages.model.chunks[transfer.chunk].input_keys
            device = self._pieces_device()
            communicator = self._stages.communicator
            told[key] = [communicator.receive_spec(transfer.source, device) for _ in takes]
        return told[key]

    def _key(self, transfer: Transfer) -> TransferKey:
        """What both ends know, and what decides the shapes: the inputs, which every stage has."""
        inputs = self._stages.model.inputs(self._micro_batches[transfer.micro_batch].inputs)
        return transfer.chunk, tuple(tuple(each.shape) for each in inputs.values())

    def _pieces_device(self) -> torch.device:
        return next(iter(self._stages.model.inputs(self._micro_batches[0].inputs).values())).device
