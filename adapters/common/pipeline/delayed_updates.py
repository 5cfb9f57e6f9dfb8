"""Versions of a stage's weights, and its passes where they go on in the next step; imports no framework."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from isotrain.plugin import (
    Batch,
    DelayedUpdates,
    IsotrainError,
    Pass,
    Slice,
    StageVersions,
    StageWork,
    Transfer,
    unknown_name,
)

_PREFIX = "pipeline/"

Update = Callable[[bool, float | None], None]
"""`update(is_late, weight)`: updates the weights by the gradients of the passes. Collective.

`is_late`: whether the gradients are of the step before. `weight`: weight of the micro-batch that they are of;
None for those of a global batch.
"""


def layout_of_versions(updates: DelayedUpdates, stage_of: Mapping[str, int]) -> str:
    """A name for the versions that all stages keep, of which weights; equal on all processes.

    Versions of another layout are of no use, even to a stage that has as many of the same weights: the others
    lack theirs.

    Args:
        updates: Schedule of the updates.
        stage_of: Stage of each trainable weight, by name.
    """
    delays = [each.delay for each in updates.versions]
    text = json.dumps([updates.within_steps, delays, stage_of], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class WeightVersions(ABC):
    """The current weights of a stage, and the versions before.

    Attributes:
        are_equal: Whether weights were set in all versions, and no version alone or by an update since.
    """

    def __init__(self, names: Sequence[str], versions: list[list[Any]], layout: str) -> None:
        """Begins with equal versions.

        Args:
            names: Names of the stage's trainable weights.
            versions: Tensors of each version, in the shapes of the weights; the current one first.
            layout: Name of what the versions of all stages are, in the names of the state.
        """
        self._names = names
        self._versions = versions
        self._prefix = f"{_PREFIX}{layout}/"
        self.are_equal = False

    @abstractmethod
    def use(self, age: int) -> None:
        """Gives the weights the values of a version. Local.

        Args:
            age: Number of updates since that version; 0 for the current one.
        """

    @abstractmethod
    def updating(self) -> AbstractContextManager[Any]:
        """Context for an update of the weights, after which the oldest version is forgotten. Local."""

    @abstractmethod
    def _current(self, index: int) -> Any:
        """Tensor of a weight in the current version, in its shape, by index."""

    @abstractmethod
    def _set(self, age: int, index: int, value: Any) -> None:
        """Sets a weight in an earlier version to a tensor of its shape, by index."""

    def equalize(self, names: Sequence[str]) -> None:
        """Sets all versions of the named weights to the current values. Local."""
        for index, name in enumerate(self._names):
            if name in names:
                self.are_equal = True
                for age in range(1, len(self._versions)):
                    self._set(age, index, self._current(index))

    def state(self) -> dict[str, Any]:
        """The earlier versions by name, in the shapes of the weights."""
        return {
            f"{self._prefix}{age}/{name}": tensor
            for age, version in enumerate(self._versions)
            for name, tensor in zip(self._names, version, strict=True)
            if age
        }

    @staticmethod
    def owns(name: str) -> bool:
        """Whether an entry of the execution state is a version of a weight."""
        return name.startswith(_PREFIX)

    def write(self, name: str, value: Any) -> None:
        """Sets an entry of `state`, in its shape; leaves out one of another layout, as `are_equal` then says.

        Raises:
            IsotrainError: There is none of that name.
        """
        if not name.startswith(self._prefix):
            return
        state = self.state()
        if name not in state:
            raise IsotrainError(unknown_name("state", name, state))
        age, _, weight = name.removeprefix(self._prefix).partition("/")
        self._set(int(age), self._names.index(weight), value)
        self.are_equal = False


class Rates:
    """Learning rates and momentum; where updates are late, those of the gradients' step."""

    def __init__(self) -> None:
        """Begins without late updates: values are set at once."""
        self._are_late = False
        self._next: dict[Callable[[Any], None], Any] = {}
        self._before: dict[Callable[[Any], None], Any] = {}

    def delay(self) -> None:
        """Lets `set` only note values for `apply` from now on. Local."""
        self._are_late = True

    def set(self, set_value: Callable[[Any], None], value: Any) -> None:
        """Sets a value for the updates with the next global batch. Local.

        Args:
            set_value: Sets it for the next update.
            value: The value.
        """
        if self._are_late:
            self._next[set_value] = value
        else:
            set_value(value)

    def apply(self, is_late: bool) -> None:
        """Sets all values for an update, by gradients of the step before if it is late. Local."""
        for set_value, value in (self._before if is_late else self._next).items():
            set_value(value)

    def end_step(self) -> None:
        """Makes the values those of the step before. Local."""
        self._before = dict(self._next)


class ContinuedPasses(StageWork):
    """Passes of a stage, a backward pass of which may be in a later step than its forward pass.

    Micro-batches have indices in the present step; those of the step before have negative ones.

    Attributes:
        share: Sum of the weighted losses of the step's passes so far, a float64 scalar.
    """

    share: Any

    @abstractmethod
    def begin_step(self, batch: Batch | None) -> None:
        """Begins a step with a global batch, or, without one, the end of the step before. Local."""

    @abstractmethod
    def exchange_gradients(self) -> None:
        """Exchanges the accumulated gradients with those that were put apart; at first none. Local."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Forgets the accumulated gradients, not those that were put apart. Local."""

    @abstractmethod
    def move_seeds(self, micro_batch: int) -> None:
        """Sets the seed generators to their states before a micro-batch of the step, by its index. Local."""

    @abstractmethod
    def end_step(self) -> None:
        """Ends a step once all processes have done it: what the step before sent has arrived. Local."""

    @abstractmethod
    def wait_sent(self) -> None:
        """Waits until all that was sent has arrived. Local."""


class OverlappedStageWork(StageWork):
    """Passes of a stage, the last of which are done in the next step; each with the right weights.

    Attributes:
        passes: The passes, with the weights that there are.
        versions: Versions of the weights.
        has_passes_left: Whether the pipeline has passes of a step that is over.
    """

    def __init__(self, passes: ContinuedPasses, versions: WeightVersions, update: Update) -> None:
        """Begins with an empty pipeline.

        Args:
            passes: The passes, with the weights that there are.
            versions: Versions of the weights.
            update: Function that updates the weights.
        """
        self.passes = passes
        self.versions = versions
        self._update = update
        self._micro_batches: Sequence[Slice] = ()
        self.has_passes_left = False

    def begin_step(self, batch: Batch | None) -> None:
        """Begins a step with a global batch, or, without one, the end of the step before. Local."""
        self._micro_batches = () if batch is None else batch.slices[0]
        self.passes.begin_step(batch)

    def end_step(self) -> None:
        """Leaves the current version in the weights. Collective."""
        self._end_step()
        self.versions.use(0)
        self.has_passes_left = bool(self._micro_batches)

    @abstractmethod
    def _end_step(self) -> None:
        """Does the updates of a step that belong to its end. Collective."""

    def _apply(self, is_late: bool, weight: float | None) -> None:
        """Makes the next version, by the gradients; the arguments are those of `Update`. Collective."""
        with self.versions.updating():
            self._update(is_late, weight)
        self.passes.clear_gradients()

    def send(self, transfer: Transfer, tensors: list[Any]) -> None:
        self.passes.send(transfer, tensors)

    def receive(self, transfer: Transfer) -> list[Any]:
        return self.passes.receive(transfer)


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
        self._first = 0  # micro-batches of the steps before
        self._updates = 0
        self._sample_weights: dict[int, float] = {}

    def begin_step(self, batch: Batch | None) -> None:
        self._first += len(self._micro_batches)
        super().begin_step(batch)

    def forward(self, work: Pass, received: list[Any]) -> list[Any]:
        self._use_version_of(work)
        weight = self._micro_batches[work.micro_batch].weight
        self._sample_weights[self._first + work.micro_batch] = weight
        return self.passes.forward(work, received)

    def backward(self, work: Pass, received: list[Any]) -> list[Any]:
        self._use_version_of(work)
        gradients = self.passes.backward(work, received)
        if not work.chunk:
            self._update_by(work.micro_batch)
        return gradients

    def send(self, transfer: Transfer, tensors: list[Any]) -> None:
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
        self.versions.use(self._updates - version)

    def _end_step(self) -> None:
        """Nothing: all updates are done."""


class DelayedStageWork(OverlappedStageWork):
    """One update in each step, by the gradient of the global batch before (PipeDream-2BW)."""

    _age = 0
    _are_apart = True

    def begin_step(self, batch: Batch | None) -> None:
        super().begin_step(batch)
        self._age = 0 if self.has_passes_left else 1
        self._are_apart = not self.has_passes_left

    def forward(self, work: Pass, received: list[Any]) -> list[Any]:
        self.versions.use(self._age)
        return self.passes.forward(work, received)

    def backward(self, work: Pass, received: list[Any]) -> list[Any]:
        is_left = work.micro_batch < 0
        if not is_left:
            self._put_gradients_apart()
        self.versions.use(1 if is_left else self._age)
        return self.passes.backward(work, received)

    def _end_step(self) -> None:
        """Does the update of the step before, whose passes are all done."""
        if self.has_passes_left:
            self._put_gradients_apart()
            self.passes.exchange_gradients()
            self._apply(True, None)
            self.passes.exchange_gradients()

    def _put_gradients_apart(self) -> None:
        """Keeps the gradients of the step before, once, from those of this one."""
        if not self._are_apart:
            self._are_apart = True
            self.passes.exchange_gradients()


def overlapped_work(updates: DelayedUpdates, stage: int, *arguments: Any) -> OverlappedStageWork:
    """The work of a stage under these updates.

    Args:
        updates: Schedule of the updates.
        stage: The stage.
        arguments: Arguments of `OverlappedStageWork`.
    """
    if updates.within_steps:
        return StashedStageWork(updates.versions[stage], *arguments)
    return DelayedStageWork(*arguments)
