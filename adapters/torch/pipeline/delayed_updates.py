"""Versions of a torch stage's weights, and its passes where they go on in the next step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.pipeline.stage import PipelineContext, TorchStageWork
from isotrain.plugin import IsotrainError, Pass, Slice, StageVersions, Transfer, unknown_name

_PREFIX = "pipeline/"

Update = Callable[[bool, float | None], None]
"""`update(is_late, weight)`: updates the weights in place by what is in `.grad`. Collective.

`is_late`: whether the gradients are of the step before. `weight`: weight of the micro-batch that they are of;
None for those of a global batch.
"""


class WeightVersions:
    """The current weights of a stage, and the versions before.

    A weight's tensor is one object with the memory of one version at a time: backward passes, as forward
    passes, see the version that it has then.

    Attributes:
        are_equal: Whether weights were set in all versions, and no version alone or by an update since.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], delay: int, layout: str) -> None:
        """Begins with equal versions.

        Args:
            weights: Trainable weights of the stage by name, any shapes.
            delay: Number of versions besides the current one.
            layout: Name of what the versions of all stages are, in the names of the state.
        """
        self._weights = weights
        self._prefix = f"{_PREFIX}{layout}/"
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
            f"{self._prefix}{age}/{name}": data
            for age, version in enumerate(self._versions)
            for name, data in zip(self._weights, version, strict=True)
            if age
        }

    def owns(self, name: str) -> bool:
        """Whether an entry of the execution state is a version of a weight."""
        return name.startswith(_PREFIX)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Sets an entry of `state`, in its shape; leaves out one of another layout, as `are_equal` then says.

        Raises:
            IsotrainError: There is none of that name.
        """
        if not name.startswith(self._prefix):
            return
        state = self.state()
        if name not in state:
            raise IsotrainError(unknown_name("state", name, state))
        state[name].copy_(value)
        self.are_equal = False


class OverlappedStageWork(TorchStageWork):
    """Passes of a stage, the last of which are done in the next step; each with the right weights.

    Attributes:
        has_passes_left: Whether the pipeline has passes of a step that is over.
    """

    def __init__(
        self,
        context: PipelineContext,
        versions: WeightVersions,
        weights: Sequence[torch.Tensor],
        update: Update,
        on_predictions: Callable[[Slice, Any], None],
    ) -> None:
        """Begins with an empty pipeline.

        Args:
            context: State that outlives a step.
            versions: Versions of the weights.
            weights: Trainable weights of the stage, any shapes, whose gradients accumulate in `.grad`.
            update: Function that updates the weights.
            on_predictions: Called with each micro-batch and the predictions for it.
        """
        super().__init__(context, (), on_predictions)
        self._versions = versions
        self._weights = weights
        self._update = update
        self.has_passes_left = False

    def begin_step(self, micro_batches: Sequence[Slice]) -> None:
        """Begins a step with these micro-batches, or, without any, the end of the one before. Local."""
        self._first += len(self._micro_batches)
        self._micro_batches = micro_batches
        self.share = torch.zeros((), dtype=torch.float64)
        self._context.seeds.start_step()

    def end_step(self) -> None:
        """Leaves the current version in the weights. Collective."""
        self._end_step()
        self._versions.use(0)
        self.has_passes_left = bool(self._micro_batches)

    @abstractmethod
    def _end_step(self) -> None:
        """Does the updates of a step that belong to its end. Collective."""

    def _apply(self, is_late: bool, weight: float | None) -> None:
        """Makes the next version, by what is in `.grad`; the arguments are those of `Update`. Collective."""
        with self._versions.begin_update():
            self._update(is_late, weight)
        for each in self._weights:
            each.grad = None

    def release_sent(self) -> None:
        """Frees what was sent for the step before: it has arrived once all stages are done with this one."""
        communicator = self._context.communicator
        for key in communicator.pending_sends:
            if isinstance(key, Transfer) and key.micro_batch < self._first:
                communicator.wait_sent(key)


class StashedStageWork(OverlappedStageWork):
    """Each backward pass updates the weights at once, and has those that its forward pass had (PipeDream)."""

    def __init__(self, of_micro_batches: StageVersions, *arguments: Any) -> None:
        """Begins with an empty pipeline.

        Args:
            of_micro_batches: Version for each micro-batch.
            arguments: Arguments of `OverlappedStageWork`.
        """
        super().__init__(*arguments)
        self._of_micro_batches = of_micro_batches
        self._updates = 0
        self._sample_weights: dict[int, float] = {}

    def forward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        self._use_version_of(work)
        index = self._first + work.micro_batch
        self._sample_weights[index] = self._micro_batches[work.micro_batch].weight
        return super().forward(work, received)

    def backward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        self._use_version_of(work)
        gradients = super().backward(work, received)
        if not work.chunk:
            self._update_by(work.micro_batch)
        return gradients

    def send(self, transfer: Transfer, tensors: list[torch.Tensor]) -> None:
        super().send(transfer, tensors)
        if transfer.direction == "backward":
            self._update_by(transfer.micro_batch)

    def _update_by(self, micro_batch: int) -> None:
        """Updates the stage together with its other processes, which may still need what was sent before."""
        weight = self._sample_weights.pop(self._first + micro_batch)
        self._apply(micro_batch < 0, weight)
        self._updates += 1

    def _use_version_of(self, work: Pass) -> None:
        version = self._of_micro_batches.version(self._first + work.micro_batch)
        self._versions.use(self._updates - version)

    def _end_step(self) -> None:
        """Nothing: all updates are done."""


class DelayedStageWork(OverlappedStageWork):
    """One update in each step, by the gradient of the global batch before (PipeDream-2BW)."""

    def __init__(self, *arguments: Any) -> None:
        """Begins with an empty pipeline; the arguments are those of `OverlappedStageWork`."""
        super().__init__(*arguments)
        self._other_gradients: list[torch.Tensor | None] = [None] * len(self._weights)
        self._age = 0
        self._is_apart = True

    def begin_step(self, micro_batches: Sequence[Slice]) -> None:
        super().begin_step(micro_batches)
        self._age = 0 if self.has_passes_left else 1
        self._is_apart = not self.has_passes_left

    def forward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        self._versions.use(self._age)
        return super().forward(work, received)

    def backward(self, work: Pass, received: list[torch.Tensor]) -> list[torch.Tensor]:
        is_left = work.micro_batch < 0
        if not is_left:
            self._put_gradients_apart()
        self._versions.use(1 if is_left else self._age)
        return super().backward(work, received)

    def _end_step(self) -> None:
        """Does the update of the step before, whose passes are all done."""
        if self.has_passes_left:
            self._put_gradients_apart()
            self._exchange_gradients()
            self._apply(True, None)
            self._exchange_gradients()

    def _put_gradients_apart(self) -> None:
        """Keeps the gradients of the step before, once, from those of this one."""
        if not self._is_apart:
            self._is_apart = True
            self._exchange_gradients()

    def _exchange_gradients(self) -> None:
        for index, weight in enumerate(self._weights):
            gradient = weight.grad
            weight.grad, self._other_gradients[index] = self._other_gradients[index], gradient
