"""Versions of a torch stage's weights, and its passes where they go on in the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.pipeline.stage import PipelineContext, TorchStageWork
from isotrain.plugin import IsotrainError, Pass, Slice, Transfer, unknown_name

_PREFIX = "pipeline/"


class WeightVersions:
    """The current weights of a stage, and the versions before.

    A weight's tensor is one object with the memory of one version at a time: backward passes, as forward
    passes, see the version that it has then.

    Attributes:
        are_equal: Whether weights were set in all versions, and no version alone or by an update since.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], delay: int) -> None:
        """Begins with equal versions.

        Args:
            weights: Trainable weights of the stage by name, any shapes.
            delay: Number of versions besides the current one.
        """
        self._weights = weights
        newest = [weight.data for weight in weights.values()]
        self._versions = [newest, *([each.clone() for each in newest] for _ in range(delay))]
        self.are_equal = False

    def use(self, age: int) -> None:
        """Gives the weights the values of a version. Local.

        Args:
            age: Number of updates since that version; 0 for the current one.
        """
        for weight, data in zip(self._weights.values(), self._versions[age], strict=True):
            weight.data = data

    def begin_update(self) -> AbstractContextManager[Any]:
        """Makes a copy of the current version current, in place of the oldest one. Local.

        Returns:
            Context for its update in place. Autograd, which knows no versions, does not notice the update.
        """
        newest, oldest = self._versions[0], self._versions.pop()
        if oldest is not newest:
            private_api.foreach_copy_(oldest, newest)
        self._versions.insert(0, oldest)
        self.are_equal = False
        self.use(0)
        return private_api.preserving_versions(self._weights.values())

    def equalize(self, names: Sequence[str]) -> None:
        """Sets all versions of the named weights to the current values. Local."""
        for name, newest, *others in zip(self._weights, *self._versions, strict=True):
            if name in names:
                self.are_equal = True
                for each in others:
                    each.copy_(newest)

    def state(self) -> dict[str, torch.Tensor]:
        """The earlier versions by name, in the shapes of the weights."""
        return {
            f"{_PREFIX}{age}/{name}": data
            for age, version in enumerate(self._versions)
            for name, data in zip(self._weights, version, strict=True)
            if age
        }

    def owns(self, name: str) -> bool:
        """Whether an entry of the execution state is a version of a weight."""
        return name.startswith(_PREFIX)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Sets an entry of `state`, in its shape.

        Raises:
            IsotrainError: There is none of that name.
        """
        state = self.state()
        if name not in state:
            raise IsotrainError(unknown_name("state", name, state))
        state[name].copy_(value)
        self.are_equal = False


class DelayedStageWork(TorchStageWork):
    """Passes of a stage, the last of which are done in the next step; each with the right weights.

    Attributes:
        has_passes_left: Whether the pipeline has passes of a step that is over.
    """

    def __init__(
        self,
        context: PipelineContext,
        versions: WeightVersions,
        weights: Sequence[torch.Tensor],
        on_predictions: Callable[[Slice, Any], None],
    ) -> None:
        """Begins with an empty pipeline.

        Args:
            context: State that outlives a step.
            versions: Versions of the weights.
            weights: Trainable weights of the stage, any shapes, whose gradients accumulate in `.grad`.
            on_predictions: Called with each micro-batch and the predictions for it.
        """
        super().__init__(context, (), on_predictions)
        self._versions = versions
        self._weights = weights
        self._other_gradients: list[torch.Tensor | None] = [None] * len(weights)
        self._age = 0
        self._is_apart = True
        self.has_passes_left = False

    def begin_step(self, micro_batches: Sequence[Slice]) -> None:
        """Begins a step with these micro-batches, or, without any, the end of the one before. Local."""
        self._first += len(self._micro_batches)
        self._micro_batches = micro_batches
        self.share = torch.zeros((), dtype=torch.float64)
        self._age = 0 if self.has_passes_left else 1
        self._is_apart = not self.has_passes_left
        self._context.seeds.start_step()

    def forward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        self._versions.use(self._age)
        return super().forward(work, received)

    def backward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        is_left = work.micro_batch < 0
        if not is_left:
            self._put_gradients_apart()
        self._versions.use(1 if is_left else self._age)
        return super().backward(work, received)

    def end_step(self, update: Callable[[], None]) -> None:
        """Does the update of the step before, whose passes are all done. Collective.

        Args:
            update: Updates the weights in place by what is in `.grad`.
        """
        if self.has_passes_left:
            self._put_gradients_apart()
            self._exchange_gradients()
            with self._versions.begin_update():
                update()
            for weight in self._weights:
                weight.grad = None
            self._exchange_gradients()
        self._versions.use(0)
        self.has_passes_left = bool(self._micro_batches)

    def _put_gradients_apart(self) -> None:
        """Keeps the gradients of the step before, once, from those of this one."""
        if not self._is_apart:
            self._is_apart = True
            self._exchange_gradients()

    def _exchange_gradients(self) -> None:
        for index, weight in enumerate(self._weights):
            gradient = weight.grad
            weight.grad, self._other_gradients[index] = self._other_gradients[index], gradient

    def release_sent(self) -> None:
        """Frees what was sent for the step before: it has arrived once all stages are done with this one."""
        communicator = self._context.communicator
        for key in communicator.pending_sends:
            if isinstance(key, Transfer) and key.micro_batch < self._first:
                communicator.wait_sent(key)
