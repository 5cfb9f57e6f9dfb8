"""Versions of a torch stage's weights, and its passes where they go on in the next step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from isotrain.adapters.common.pipeline.delayed_updates import ContinuedPasses, WeightVersions
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.without_values import MissingValueError, lacks_values
from isotrain.adapters.torch.pipeline.stage import PipelineContext, TorchStageWork
from isotrain.plugin import Batch, Slice, Transfer


class TorchWeightVersions(WeightVersions):
    """Versions of torch weights.

    A weight's tensor is one object with the memory of one version at a time: backward passes, as forward
    passes, see the version that it has then.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], delay: int, layout: str) -> None:
        """Begins with equal versions.

        Args:
            weights: Trainable weights of the stage by name, any shapes.
            delay: Number of versions besides the current one.
            layout: Name of what the versions of all stages are, in the names of the state.
        """
        self._weights = list(weights.values())
        newest = [weight.data for weight in self._weights]
        versions = [newest, *([each.clone() for each in newest] for _ in range(delay))]
        super().__init__(list(weights), versions, layout)

    def use(self, age: int) -> None:
        if any(map(lacks_values, self._versions[age])):
            # a weight with such memory would not be known to lack values
            raise MissingValueError("weights have several versions")
        for weight, data in zip(self._weights, self._versions[age], strict=True):
            weight.data = data

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Lets a copy of the current version be updated, in place of the oldest one.

        Autograd, which knows no versions, does not notice the update.
        """
        newest, oldest = self._versions[0], self._versions.pop()
        if oldest is not newest:
            private_api.foreach_copy_(oldest, newest)
        self._versions.insert(0, oldest)
        self.are_equal = False
        self.use(0)
        with private_api.preserving_versions(self._weights):
            yield

    def _current(self, index: int) -> torch.Tensor:
        return self._versions[0][index]

    def _set(self, age: int, index: int, value: torch.Tensor) -> None:
        with torch.no_grad():
            self._versions[age][index].copy_(value)


class ContinuedStageWork(TorchStageWork, ContinuedPasses):
    """Passes of a torch stage, the last of which are done in the next step."""

    def __init__(
        self,
        context: PipelineContext,
        weights: Sequence[torch.Tensor],
        on_predictions: Callable[[Slice, Any], None],
    ) -> None:
        """Begins with an empty pipeline.

        Args:
            context: State that outlives a step.
            weights: Trainable weights of the stage, any shapes, whose gradients accumulate in `.grad`.
            on_predictions: Called with each micro-batch and the predictions for it.
        """
        super().__init__(context, (), on_predictions)
        self._weights = weights
        self._gradients_apart: list[torch.Tensor | None] = [None] * len(weights)

    def begin_step(self, batch: Batch | None) -> None:
        self._first += len(self._micro_batches)
        self._micro_batches = () if batch is None else batch.slices[0]
        self.share = torch.zeros((), dtype=torch.float64)
        self._context.seeds.start_step()

    def exchange_gradients(self) -> None:
        apart = self._gradients_apart
        for index, weight in enumerate(self._weights):
            weight.grad, apart[index] = apart[index], weight.grad

    def clear_gradients(self) -> None:
        for weight in self._weights:
            weight.grad = None

    def move_seeds(self, micro_batch: int) -> None:
        self._context.seeds.move_to(micro_batch)

    def end_step(self) -> None:
        """Frees what was sent for the step before."""
        communicator = self._context.communicator
        for key in communicator.pending_sends:
            if isinstance(key, Transfer) and key.micro_batch < self._first:
                communicator.wait_sent(key)

    def wait_sent(self) -> None:
        self._context.communicator.wait_all_sent()
