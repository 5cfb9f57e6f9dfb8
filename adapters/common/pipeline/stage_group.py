"""Steps that the pipeline groups of all frameworks do alike; imports no framework."""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isotrain.adapters.common.pipeline.delayed_updates import (
    ContinuedPasses,
    OverlappedStageWork,
    Rates,
    WeightVersions,
    layout_of_versions,
    overlapped_work,
)
from isotrain.adapters.common.pipeline.split_model import no_comparison_needed
from isotrain.adapters.common.pipeline.topology import ReplicaTopology
from isotrain.plugin import (
    Action,
    Batch,
    DelayedUpdates,
    ExecutedAction,
    ReplicaGroup,
    Slice,
    StageWork,
    execute_stage,
)

_ESTIMATED = (
    "pipeline: without values its layers are not timed: stages are balanced by the operations and bytes of"
    " their layers, and the times are estimates for a GPU, without loss and update. A run that has values"
    " times them, and may cut elsewhere: the option cut fixes it"
)
"""Plan note on layers whose times are estimated."""
_SHAPES_COMPARED = (
    "pipeline: the modules, one after the other, are compared with the model, outputs without values by their"
    " shapes alone. A run compares all numbers when it starts, and may refuse the modules"
)
"""Plan note on modules that are compared with their model."""


class StageGroup(ReplicaGroup):
    """Base of a pipeline group, before the group of its framework."""

    _without_values: Any
    """The framework's context in which large tensors have no values, with the attribute `entered`."""
    _topology: ReplicaTopology
    _context: Any
    _stage_of: Mapping[int, int]
    _trainable: Mapping[str, Any]
    _check_equivalence: Callable[[Any], None]
    _set_rate: Callable[[float], None]
    _updates: DelayedUpdates | None = None
    _delayed_work: OverlappedStageWork | None = None

    def __init__(self, *arguments: Any) -> None:
        """Begins without delayed updates; the arguments are those of the framework's group."""
        self._rates = Rates()
        self._executed: list[ExecutedAction] = []
        super().__init__(*arguments)

    @property
    @abstractmethod
    def _has_all_weights(self) -> bool:
        """Whether the weights of all stages are here."""

    @abstractmethod
    def _reshard(self) -> None:
        """Drops the weights of other stages. Local."""

    @abstractmethod
    def _continued(
        self, weights: Mapping[str, Any], delay: int, layout: str
    ) -> tuple[ContinuedPasses, WeightVersions]:
        """Passes with such weights of this stage; versions, whose arguments these are. Local."""

    @abstractmethod
    def _delayed_update(self, is_late: bool, weight: float | None) -> None:
        """Updates this stage at the rates of the gradients' step; see `Update`. Collective."""

    @abstractmethod
    def _average_statistics(self, weight: float) -> None:
        """Averages moving statistics over the processes of this stage, of which this has a weight."""

    @abstractmethod
    def _mean_loss(self, share: Any) -> Any:
        """Mean loss of the global batch, a scalar, from the shares of all processes. Collective."""

    def _begin_passes(self, micro_batches: Sequence[Slice]) -> None:
        """Drops other stages' weights; before, checks once that the stages are the model."""
        if self._has_all_weights:
            for micro_batch in itertools.islice((each for each in micro_batches if each.count), 1):
                self._check_equivalence(micro_batch.inputs)
        self._reshard()

    def _execute(self, actions: Sequence[Sequence[Action]], work: StageWork) -> None:
        process = self._topology.process
        self._executed = execute_stage(actions[process], process, work)

    def _weight_of(
        self, micro_batches: Sequence[Slice], actions: Sequence[Sequence[Action]]
    ) -> float:
        """Sum of the weights of this process's micro-batches of the step."""
        own = micro_batches_of(actions[self._topology.process])
        return sum(micro_batches[index].weight for index in own)

    def start_delayed_updates(self, updates: DelayedUpdates) -> None:
        stage = self._topology.stage
        stage_of = {name: self._stage_of.get(id(w), 0) for name, w in self._trainable.items()}
        local = {name: w for name, w in self._trainable.items() if stage_of[name] == stage}
        layout = layout_of_versions(updates, stage_of)
        passes, versions = self._continued(local, updates.versions[stage].delay, layout)
        self._updates = updates
        self._delayed_work = overlapped_work(updates, stage, passes, versions, self._delayed_update)
        self._rates.delay()

    def delayed_step(self, batch: Batch, learning_rate: float) -> Any:
        assert self._updates is not None
        assert self._delayed_work is not None
        micro_batches, work = batch.slices[0], self._delayed_work
        actions = self._updates.steady if work.has_passes_left else self._updates.fill
        self._begin_passes(micro_batches)
        self._rates.set(self._set_rate, learning_rate)
        work.begin_step(batch)
        self._execute(actions, work)
        work.passes.move_seeds(len(micro_batches))
        work.end_step()
        self._rates.end_step()
        self._average_statistics(self._weight_of(micro_batches, actions))
        loss = self._mean_loss(work.passes.share)
        work.passes.end_step()
        return loss

    def drain_pipeline(self) -> None:
        work = self._delayed_work
        if self._updates is None or work is None or not work.has_passes_left:
            return
        work.begin_step(None)
        self._execute(self._updates.drain, work)
        work.passes.wait_sent()
        work.end_step()

    @property
    def _versions(self) -> WeightVersions | None:
        """Versions of this stage's weights; None without delayed updates."""
        return None if self._delayed_work is None else self._delayed_work.versions

    def has_equal_versions(self) -> bool:
        return self._versions is not None and self._versions.are_equal

    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        self._rates.set(super().set_group_rates, rates)

    def momentum_setter(self) -> Callable[[float], None] | None:
        set_momentum = super().momentum_setter()
        return None if set_momentum is None else functools.partial(self._rates.set, set_momentum)

    def reshard_weights(self) -> None:
        self.drain_pipeline()
        self._reshard()

    @property
    def _lacks_values(self) -> bool:
        """Whether large tensors have no values, as in plans."""
        return self._without_values.entered is not None

    def plan_notes(self) -> list[str]:
        notes = super().plan_notes() + self._context.model.describe(self._topology.stages)
        if not self._lacks_values:
            return notes
        is_compared = self._check_equivalence is not no_comparison_needed
        return [*notes, _ESTIMATED, *([_SHAPES_COMPARED] if is_compared else [])]

    @property
    def is_single_process(self) -> bool:
        return self.replicas * self._topology.processes == 1

    def close(self) -> None:
        self.drain_pipeline()
        super().close()


def micro_batches_of(actions: Sequence[Action]) -> list[int]:
    """Indices of the step's micro-batches that a process with these actions has, ascending."""
    return sorted({action.micro_batch for action in actions if action.micro_batch >= 0})
