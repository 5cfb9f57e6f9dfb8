"""Replica group of a run with named updates: their groups, over one model, as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from isotrain.core.contracts.backend.group_hooks import LayerTrait
from isotrain.core.contracts.backend.group_protocols import (
    ExportingGroup,
    ProfilingGroup,
    WeightsFileGroup,
)
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.contracts.backend.replica import Computation, Tensor
from isotrain.core.contracts.backend.replica_group import Phase, ReplicaGroup
from isotrain.core.contracts.state import MODEL_STATE, ExportForm, StateInfo, StateKind
from isotrain.core.data.batch import Batch
from isotrain.core.errors import IsotrainError

if TYPE_CHECKING:
    import numpy as np


T = TypeVar("T")

_SHARED: tuple[StateKind, ...] = ("random", "carry")
"""Kinds of state of the model, which all updates share and the first group reads and writes."""


class NamedUpdatesGroup(ReplicaGroup):
    """Replica group whose steps are those of its `updates`; all else is done for the whole model.

    State of an update has its name: `optimizer/NAME/...`. So have its metrics: `NAME_loss`.
    """

    def __init__(self, updates: Mapping[str, ReplicaGroup]) -> None:
        """Joins the groups of the updates, which share one model."""
        self._updates = updates
        self._groups = list(updates.values())
        self._first = self._groups[0]
        self.replicas = self._first.replicas
        self.local_replicas = self._first.local_replicas
        self._trainable = {n for each in self._groups for n in each.describe_state(("trainable",))}

    @property
    def updates(self) -> Mapping[str, ReplicaGroup]:
        return self._updates

    @property
    def model(self) -> Any:
        """Model of this process's replicas."""
        return self._first.model

    def to_device(self, arrays: Any) -> Any:
        return self._first.to_device(arrays)

    def is_on_device(self, value: Any) -> bool:
        return self._first.is_on_device(value)

    def tensor(self, array: np.ndarray) -> Tensor:
        return self._first.tensor(array)

    def numpy(self, tensor: Tensor) -> np.ndarray:
        return self._first.numpy(tensor)

    def gradients(self, batch: Batch) -> tuple[list[list[Tensor]], Tensor]:
        raise IsotrainError(f"gradients: name the update, one of {', '.join(self.updates)}.")

    def apply_gradients(self, gradients: Sequence[Sequence[Tensor]], learning_rate: float) -> None:
        raise IsotrainError(f"apply_gradients: name the update, one of {', '.join(self.updates)}.")

    def evaluation_step(self, batch: Batch) -> None:
        for each in self._groups:
            each.evaluation_step(batch)

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        return self._first.predict(inputs)

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        by_update = {name: each.collect_metrics(phase) for name, each in self.updates.items()}
        named = {
            f"{update}_{name}": value
            for update, metrics in by_update.items()
            for name, value in metrics.items()
        }
        if phase == "train":
            return named
        return {"loss": sum(metrics["loss"] for metrics in by_update.values()), **named}

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        return self._first.compute(computation, *values, static=static)

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        return self._merged(kinds, lambda group, kind: group.read_state((kind,), replica=replica))

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        return self._merged(
            kinds, lambda group, kind: group.describe_state((kind,), replica=replica)
        )

    def _merged(
        self, kinds: Sequence[StateKind], read: Callable[[ReplicaGroup, StateKind], dict[str, T]]
    ) -> dict[str, T]:
        """State of kinds by name, as `read` returns it for one kind of a group."""
        merged: dict[str, T] = {}
        for kind in kinds:
            if kind == "trainable":
                for group in self._groups:
                    merged |= read(group, kind)
            elif kind == "non-trainable":
                others = read(self._first, kind).items()
                merged |= {name: value for name, value in others if name not in self._trainable}
            elif kind in _SHARED:
                merged |= read(self._first, kind)
            else:
                for update, group in self.updates.items():
                    for name, value in read(group, kind).items():
                        merged[f"{kind}/{update}/{name.removeprefix(f'{kind}/')}"] = value
        return merged

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        weights = self.describe_state(("trainable", "non-trainable"))
        by_update: dict[str, dict[str, np.ndarray]] = {name: {} for name in self.updates}
        shared = next(iter(by_update.values()))
        for name, value in state.items():
            kind, _, rest = name.partition("/")
            update, _, local = rest.partition("/")
            if name in weights or kind in _SHARED or update not in by_update:
                shared[name] = value
            else:
                by_update[update][f"{kind}/{local}"] = value
        for update, group in self.updates.items():
            group.write_state(by_update[update], replica=replica)

    @contextlib.contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self._groups:
                stack.enter_context(each.preserving_training_state())
            yield

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        with self._first.preserving_state():
            yield

    def traits(self) -> list[LayerTrait]:
        return list(dict.fromkeys(trait for each in self._groups for trait in each.traits()))

    def plan_notes(self) -> list[str]:
        notes = (note for each in self._groups for note in each.plan_notes())
        return list(dict.fromkeys(notes))

    def step_notes(self, batch: Batch) -> list[str]:
        notes = (note for each in self._groups for note in each.step_notes(batch))
        return list(dict.fromkeys(notes))

    def refuses_single_sample(self, batch: Batch) -> str | None:
        layers = (each.refuses_single_sample(batch) for each in self._groups)
        return next((layer for layer in layers if layer), None)

    def objective_communicates(self) -> bool:
        return any(each.objective_communicates() for each in self._groups)

    def snapshot_scalar(self, value: Any) -> Any:
        return self._first.snapshot_scalar(value)

    def not_checkpointed(self) -> list[str]:
        state = (each for group in self._groups for each in group.not_checkpointed())
        return list(dict.fromkeys(state))

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        """Reads a file of weights; see `WeightsFileGroup`."""
        return require(self._first, WeightsFileGroup).read_weights_file(path)

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        """Writes the model; see `ExportingGroup`."""
        require(self._first, ExportingGroup).export(form, target, inputs)

    def start_profile(self, folder: Path) -> Callable[[], None]:
        """Starts the framework's profiler; see `ProfilingGroup`."""
        return require(self._first, ProfilingGroup).start_profile(folder)

    def barrier(self) -> None:
        self._first.barrier()

    def synchronize_device(self) -> None:
        for each in self._groups:
            each.synchronize_device()

    def close(self) -> None:
        for each in reversed(self._groups):
            each.close()
