"""Forward and backward passes, and transfers, of one torch process in one step of a pipeline run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from isotrain.adapters.common.pipeline.split_model import (
    PipelineChunk,
    PipelineLosses,
    PipelineModel,
)
from isotrain.adapters.torch.base import gpu
from isotrain.adapters.torch.base.private_api import storage_of
from isotrain.adapters.torch.base.tensors import restored_after, separate_gradients
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.plugin import Pass, Slice, StageWork, Transfer

TransferKey = tuple[int, int, tuple[tuple[int, ...], ...]]
"""Index of a chunk, the other process, and the shapes of the model's inputs."""


class StageSeeds:
    """Seed generators of a stage with several processes: each draws as if it computed all micro-batches."""

    def __init__(self, seeds: Sequence[Any]) -> None:
        """Takes the states of the generators, shape `[2]`: seed, and number of draws so far.

        Args:
            seeds: Keras variables; empty where the stage has one process.
        """
        self._variables = seeds
        self._starts: list[torch.Tensor] = []
        self._draws: list[torch.Tensor] = []

    @property
    def _seeds(self) -> list[torch.Tensor]:
        return [variable.value for variable in self._variables]

    def start_step(self) -> None:
        """Records the states at the start of a step. Local."""
        self._starts = [seed.clone() for seed in self._seeds]

    def count_draws(self, compute: Callable[[], object]) -> None:
        """Counts the draws of a micro-batch, at the first call. Local.

        Args:
            compute: Draws as a micro-batch does.
        """
        if self._seeds and not self._draws:
            # Keras draws some numbers from torch's own generator
            generators = torch.random.fork_rng(gpu.holding(self._seeds))
            with torch.no_grad(), restored_after(self._seeds), generators:
                compute()
                self._draws = [
                    seed - start for seed, start in zip(self._seeds, self._starts, strict=True)
                ]

    def move_to(self, micro_batch: int) -> None:
        """Sets the states to those before a micro-batch of the step, by its index. Local."""
        with torch.no_grad():
            for seed, start, draws in zip(self._seeds, self._starts, self._draws, strict=True):
                seed.copy_(start + micro_batch * draws)


@dataclass
class PipelineContext:
    """State of a stage that outlives a step.

    Attributes:
        model: Split model.
        communicator: Communicator with the other stages.
        loss: Losses of the chunks.
        weights: Trainable weights of the stage, any shapes.
        statistics: Moving statistics of the stage.
        seeds: Seed generators of the stage.
        known_specs: Empty tensors with the shapes and dtypes of transfers that the receiver knows already.
    """

    model: PipelineModel
    communicator: PipelineCommunicator
    loss: PipelineLosses
    weights: Sequence[torch.Tensor]
    statistics: Sequence[torch.Tensor]
    seeds: StageSeeds
    known_specs: dict[TransferKey, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Activations:
    """Tensors of a forward pass that its backward pass needs.

    Attributes:
        inputs: Tensors received from earlier chunks; leaves of the autograd graph.
        outputs: Tensors sent to later chunks.
        loss: Weighted loss, a scalar.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    loss: torch.Tensor


class TorchStageWork(StageWork):
    """Passes through the chunks of this process in one step.

    Attributes:
        share: Sum of the weighted losses of the passes so far, a float64 scalar.
    """

    def __init__(
        self,
        context: PipelineContext,
        micro_batches: Sequence[Slice],
        on_predictions: Callable[[Slice, Any], None],
    ) -> None:
        """Begins a step.

        Args:
            context: State that outlives a step.
            micro_batches: Micro-batches of the step.
            on_predictions: Called with each micro-batch and the predictions for it.
        """
        self._context = context
        self._micro_batches = micro_batches
        self._on_predictions = on_predictions
        self._first = 0  # micro-batches of the steps before, whose passes may be left
        self._activations: dict[tuple[int, int], _Activations] = {}
        self.share: torch.Tensor = torch.zeros((), dtype=torch.float64)
        context.seeds.start_step()

    def forward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        micro_batch, chunk = self._micro_batches[work.micro_batch], self._chunk(work)
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in received]
        tensors = self._context.model.inputs(micro_batch.inputs) | dict(
            zip(chunk.input_keys, leaves, strict=True)
        )
        inputs, statistics = tensors, self._context.statistics

        def preserving() -> Any:
            with restored_after(statistics):
                return chunk(inputs, training=True)

        self._context.seeds.count_draws(preserving)
        self._context.seeds.move_to(work.micro_batch)
        tensors = chunk(inputs, training=True) if micro_batch.count else preserving()
        outputs = chunk.boundary_tensors(tensors)
        loss, predictions = self._context.loss.of(chunk, tensors, micro_batch.targets)
        loss = loss * micro_batch.weight
        if chunk is self._context.model.chunks[-1]:
            self._on_predictions(micro_batch, predictions)
        self.share = self.share + loss.detach().double()
        self._activations[work.chunk, self._first + work.micro_batch] = _Activations(
            leaves, outputs, loss
        )
        return [each.detach() for each in outputs]

    def _chunk(self, work: Pass) -> PipelineChunk:
        return self._context.model.chunks[work.chunk]

    def backward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        activations = self._activations.pop((work.chunk, self._first + work.micro_batch))
        differentiable = [each for each in activations.outputs if each.is_floating_point()]
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = [
            (root, gradient)
            for root, gradient in zip(differentiable, received, strict=True)
            if root.requires_grad
        ]
        if activations.loss.requires_grad:
            pairs.append((activations.loss, None))
        without = [each for each in self._context.weights if each.grad is None]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
            separate_gradients(self._context.weights)
        gradients = [each.grad for each in without if each.grad is not None]
        # one that autograd gave the same memory is added to in place, maybe while that is sent
        taken = {storage_of(each) for each in gradients if each.layout == torch.strided}
        return [
            _apart(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, taken)
            for leaf in activations.inputs
            if leaf.requires_grad
        ]

    def send(self, transfer: Transfer, tensors: list[torch.Tensor]) -> None:
        communicator, sent = self._context.communicator, self._counted(transfer)
        if transfer.direction == "forward":
            key = self._key(transfer, transfer.destination)
            if key not in self._context.known_specs:
                self._context.known_specs[key] = [
                    torch.empty_like(each, device="meta") for each in tensors
                ]
                for each in tensors:
                    communicator.send_spec(each, transfer.destination, sent)
        for each in tensors:
            communicator.send(each, transfer.destination, sent)

    def receive(self, transfer: Transfer) -> list[torch.Tensor]:
        communicator = self._context.communicator
        received = [communicator.receive(each, transfer.source) for each in self._specs(transfer)]
        if transfer.direction == "backward":  # so the activations that were sent have arrived
            communicator.wait_sent(self._counted(transfer).activation_transfer)
        return received

    def _counted(self, transfer: Transfer) -> Transfer:
        """The transfer with an index that counts on from step to step."""
        return replace(transfer, micro_batch=self._first + transfer.micro_batch)

    def _specs(self, transfer: Transfer) -> list[torch.Tensor]:
        """Tensors with the shapes and dtypes of those that a transfer brings."""
        if transfer.direction == "backward":
            activations = self._activations[transfer.chunk, self._first + transfer.micro_batch]
            return [each for each in activations.outputs if each.is_floating_point()]
        key, specs = self._key(transfer, transfer.source), self._context.known_specs
        if key not in specs:
            input_keys = self._context.model.chunks[transfer.chunk].input_keys
            device = self._input_device()
            communicator = self._context.communicator
            specs[key] = [communicator.receive_spec(transfer.source, device) for _ in input_keys]
        return specs[key]

    def _key(self, transfer: Transfer, peer: int) -> TransferKey:
        """Key that both ends compute: the input shapes, which every stage has, decide all others."""
        inputs = self._context.model.inputs(self._micro_batches[transfer.micro_batch].inputs)
        return transfer.chunk, peer, tuple(tuple(each.shape) for each in inputs.values())

    def _input_device(self) -> torch.device:
        return next(iter(self._context.model.inputs(self._micro_batches[0].inputs).values())).device


def _apart(gradient: torch.Tensor, taken: Collection[Hashable]) -> torch.Tensor:
    """A gradient of any shape, or a copy where its storage is among those taken."""
    return gradient.clone() if storage_of(gradient) in taken else gradient
