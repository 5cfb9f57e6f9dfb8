"""Times the layers, the loss and the update of a split torch model, as its steps compute them."""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from isotrain.adapters.common.pipeline.profiler import (
    ROUNDS,
    Compute,
    ProfiledCall,
    described_calls,
    profile_calls,
    seconds_in_turn,
    with_updates,
)
from isotrain.adapters.common.pipeline.split_model import PipelineChunk
from isotrain.adapters.torch.base.pass_costs import costs_of
from isotrain.adapters.torch.base.tensors import restored_after
from isotrain.adapters.torch.pipeline.stage import PipelineContext
from isotrain.adapters.torch.replica.metrics import MetricCollection
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import ModelProfile, Slice

Loss = Callable[[Mapping[Any, Any]], torch.Tensor]
"""Function from all tensors by key to the loss, a scalar; it adds to the metrics, too."""


class LayerProfiler:
    """Profiles all chunks of a split model in one process. Local."""

    def __init__(
        self,
        context: PipelineContext,
        trainer: ReplicaTrainer,
        metrics: MetricCollection,
        norm: Callable[[Sequence[torch.Tensor]], torch.Tensor | None],
        synchronize: Callable[[], None],
    ) -> None:
        """Takes what a stage has.

        Args:
            context: State of the stage, with the split model.
            trainer: Trainer of the model.
            metrics: Metrics, which stay as they are.
            norm: Function from weights to the norm to clip by; see `ReplicaTrainer.apply`.
            synchronize: Waits until the device is done.
        """
        self._model, self._loss = context.model, context.loss
        self._trainer, self._metrics, self._norm = trainer, metrics, norm
        self._synchronize = synchronize

    def estimated(self, micro_batch: Slice) -> ModelProfile:
        """Profile of the layers by their costs, without loss and update."""
        tensors = self._model.inputs(micro_batch.inputs)
        return profile_calls(self._model.layer_calls(), tensors, self._passes, costs_of)

    def measured(self, micro_batch: Slice) -> ModelProfile:
        """Profile by the times of a micro-batch. Gradients of the weights are cleared."""
        model = self._model
        calls, tensors = list(model.layer_calls()), model.inputs(micro_batch.inputs)
        with torch.no_grad():
            layers = described_calls(calls, tensors, lambda call, inputs, _: call.compute(*inputs))
        seconds, updates, loss_seconds = [], [], 0.0
        chunk_of = model.stage_of_weights(len(model.chunks))
        for number, chunk in enumerate(model.chunks):
            own = [call for call in calls if call.chunk == number]
            is_last = number == len(model.chunks) - 1
            loss = functools.partial(self._computed_loss, micro_batch) if is_last else None
            with self._metrics.measuring("train"):
                times, loss_seconds = self._chunk_times(own, tensors, chunk, loss)
            seconds += times
            weights = {
                index: weight
                for index, weight in enumerate(self._trainer.trainable.values())
                if chunk_of.get(id(weight), 0) == number
            }
            updates.append(self._update_seconds(weights))
            for weight in weights.values():
                weight.grad = None
        timed = [
            replace(layer, forward=forward, backward=backward)
            for layer, (forward, backward) in zip(layers, seconds, strict=True)
        ]
        return with_updates(timed, updates, loss_seconds)

    def _computed_loss(self, micro_batch: Slice, tensors: Mapping[Any, Any]) -> torch.Tensor:
        loss, predictions = self._loss.of(self._model.chunks[-1], tensors, micro_batch.targets)
        self._metrics.train(micro_batch, predictions)
        return loss * micro_batch.weight

    def _update_seconds(self, weights: Mapping[int, torch.Tensor]) -> float:
        """Seconds in which an optimizer of its own updates weights by their gradients; these weights stay.

        Args:
            weights: Weights of any shapes by their indices in the trainable ones.
        """
        updated = list(weights.values())
        if all(each.grad is None for each in updated):
            return 0.0
        trainer = copy.copy(self._trainer)
        trainer.shard_optimizer(list(weights))

        def update() -> None:
            trainer.apply(self._norm(updated))
            self._synchronize()

        with restored_after(updated):
            (seconds,) = seconds_in_turn([update])
        return seconds

    def _chunk_times(
        self,
        calls: Sequence[ProfiledCall],
        tensors: Mapping[Any, Any],
        chunk: PipelineChunk,
        loss: Loss | None,
    ) -> tuple[list[tuple[float, float]], float]:
        """Median times of a chunk: of each layer forward and backward, and of the loss in both passes.

        Args:
            calls: Calls of the layers of the chunk, in order.
            tensors: Tensors of a micro-batch by key, `[samples, ...]`: those that the layers take.
            chunk: The chunk.
            loss: Loss of the last chunk; None for other chunks.
        """
        rounds = [self._round(calls, tensors, chunk, loss) for _ in range(1 + ROUNDS)][1:]
        forward, backward = (
            [
                statistics.median(seconds)
                for seconds in zip(*(each[index] for each in rounds), strict=True)
            ]
            for index in range(2)
        )
        return [*zip(forward, backward, strict=True)], statistics.median(of for *_, of in rounds)

    def _round(
        self,
        calls: Sequence[ProfiledCall],
        tensors: Mapping[Any, Any],
        chunk: PipelineChunk,
        loss: Loss | None,
    ) -> tuple[list[float], list[float], float]:
        """Seconds of each forward and each backward pass, and of the loss; arguments as of `_chunk_times`.

        As in a step, the gradients of all layers are computed in one graph: some of torch's kernels take
        twice as long with the memory layout that the gradient of a later layer has. They add up in `.grad`.
        """
        computed = {key: tensor.detach() for key, tensor in tensors.items()}
        for key in chunk.input_keys:
            computed[key].requires_grad_(computed[key].is_floating_point())
        forward, backward = [], [0.0] * len(calls)
        begins: list[tuple[int, float]] = []

        def begin_backward(index: int, gradient: torch.Tensor) -> None:
            begins.append((index, self._clock()))

        for index, call in enumerate(calls):
            inputs = [computed[key] for key in call.input_keys]
            begin = self._clock()
            outputs = call.compute(*inputs)
            forward.append(self._clock() - begin)
            for output in outputs:
                if output.requires_grad and all(output is not each for each in inputs):
                    output.register_hook(functools.partial(begin_backward, index))
            computed |= zip(call.output_keys, outputs, strict=True)
        begin = self._clock()
        roots = [computed[key] for key in chunk.output_keys] if loss is None else [loss(computed)]
        of_loss = self._clock() - begin
        roots = [each for each in roots if each.requires_grad]
        gradients = [torch.ones_like(each) for each in roots]
        begin = self._clock()
        if roots:
            torch.autograd.backward(roots, gradients)
        begins.append((-1, self._clock()))
        for (index, start), (_, end) in itertools.pairwise(begins):
            backward[index] += end - start
        return forward, backward, of_loss + begins[0][1] - begin

    def _clock(self) -> float:
        """Seconds, once the device has done what was started."""
        self._synchronize()
        return time.perf_counter()

    def _passes(
        self,
        compute: Compute,
        inputs: Sequence[torch.Tensor],
        differentiable: Sequence[bool],
        trained: Sequence[Any],
    ) -> tuple[Callable[[], list[torch.Tensor]], Callable[[], None]]:
        """Makes the forward pass, and forward with backward pass, of a layer whose costs are asked for.

        Args:
            compute: Function of the layer's input tensors.
            inputs: Input tensors of the layer, `[samples, ...]`.
            differentiable: For each input, whether its gradient is computed.
            trained: Trainable weights of the layer.
        """
        leaves = [
            each.detach().requires_grad_(has_gradient and each.is_floating_point())
            for each, has_gradient in zip(inputs, differentiable, strict=True)
        ]

        def forward() -> list[torch.Tensor]:
            return [each.detach() for each in compute(*leaves)]

        def forward_and_backward() -> None:
            roots = [each for each in compute(*leaves) if each.requires_grad]
            if roots:  # as in steps: a reentrant checkpoint of the user refuses torch.autograd.grad
                torch.autograd.backward(roots, list(map(torch.ones_like, roots)))
            for tensor in (*leaves, *trained):
                tensor.grad = None

        return forward, forward_and_backward
