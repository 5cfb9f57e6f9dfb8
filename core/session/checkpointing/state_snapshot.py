"""What checkpoints hold of the state: copies, begun between two steps and finished beside the next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from isotrain.core.checkpoints.tensor_part import Section, TensorPart
from isotrain.core.contracts.device_mesh import DATA
from isotrain.core.contracts.state import MODEL_STATE, StateInfo, StateKind
from isotrain.core.contracts.strategy import StrategyState
from isotrain.core.session.training.context import SessionContext

_OF_REPLICA = "replica-"


def replica_section(replica: int, stage: int) -> str:
    """Of a stage of a replica; one that lies in no stages is its own first."""
    return f"{_OF_REPLICA}{replica}" + (f"-stage-{stage}" if stage else "")


def replica_sections(sections: Iterable[str]) -> list[str]:
    """Those among a checkpoint's sections, in its order."""
    return [section for section in sections if section.startswith(_OF_REPLICA)]


REPLICATED_STATE: tuple[StateKind, ...] = (*MODEL_STATE, "loss-scale")
"""What is equal on replicas whose weights are."""
REPLICA_STATE: tuple[StateKind, ...] = ("random", "metrics", "exchange", "carry")
"""What each replica has for itself."""
PendingCopy = Callable[[], Section]
"""Finishes the copy of a section, and gives it."""


class StateSnapshot:
    """Copies one process's share of the state of a run, section by section, again and again."""

    def __init__(self, session_context: SessionContext, rank: int) -> None:
        """Copies nothing yet.

        Args:
            session_context: Whose state is copied.
            rank: Of this process.
        """
        self._group = session_context.group
        self._mesh = session_context.plan.device_mesh
        self._stage = session_context.stage
        self._rank = rank
        self._kept: dict[int | None, dict[str, np.ndarray]] = {}

    def begin_copies(self, differ: bool, kept: StrategyState) -> dict[str, PendingCopy]:
        """Begins to copy each section; the group waits for who does not finish that.

        Args:
            differ: Whether each replica's weights are its own.
            kept: What the strategy keeps.
        """
        copies: dict[str, PendingCopy] = {}
        try:
            self._begin(copies, differ, kept)
        except BaseException:
            finish_copies(copies)
            raise
        return copies

    def _begin(self, copies: dict[str, PendingCopy], differ: bool, kept: StrategyState) -> None:
        group = self._group
        kinds = (*REPLICATED_STATE, *REPLICA_STATE) if differ else REPLICA_STATE
        if not self._rank:
            copies["strategy"] = functools.partial(_as_parts, kept.tensors)
        for replica, tensors in kept.per_replica.items():
            copies[f"strategy-{replica}"] = functools.partial(_as_parts, tensors)
        if not differ and not self._mesh.coordinates(self._rank).get(DATA):
            copies["state"] = self._state()
        for replica in group.local_replicas:
            own = replica_section(replica, self._stage)
            copies[own] = self._parts(kinds, replica)

    def _state(self) -> PendingCopy:
        """What this process writes of the state that replicas have alike, or in parts.

        Rank 0 writes what all have; each part is written by one of those that have it.
        """
        rank, kinds = self._rank, REPLICATED_STATE
        if rank:
            kinds = tuple(kind for kind in kinds if self._has_parts(kind))
        copy, described = self._parts(kinds, None), self._group.describe_state(kinds)
        return lambda: {
            n: part for n, part in copy().items() if described[n].offset is not None or not rank
        }

    def _parts(self, kinds: tuple[StateKind, ...], replica: int | None) -> PendingCopy:
        """Of state; the copy before is written by now."""
        described = self._group.describe_state(kinds, replica=replica)
        kept = self._kept.setdefault(replica, {})
        copy = self._group.copy_state(kinds, kept, replica=replica)
        return lambda: {name: _part(array, described[name]) for name, array in copy().items()}

    def _has_parts(self, kind: StateKind) -> bool:
        infos = self._group.describe_state((kind,)).values()
        return any(info.offset is not None for info in infos)


def finished_copy(section: Section) -> PendingCopy:
    """A copy that is finished."""
    return lambda: section


def finish_copies(copies: Mapping[str, PendingCopy]) -> dict[str, Section]:
    """Finishes all copies, also where one of them fails: groups wait for them."""
    sections, faults = dict[str, Section](), []
    for name, copy in copies.items():
        try:
            sections[name] = copy()
        except Exception as error:  # no memory
            faults.append(error)
    if faults:
        raise faults[0]
    return {name: section for name, section in sections.items() if section}


def _part(array: np.ndarray, info: StateInfo) -> TensorPart:
    if info.offset is None:
        return TensorPart(array, info.dtype)
    return TensorPart(array, info.dtype, info.shape, info.offset)


def _as_parts(tensors: Mapping[str, Any]) -> dict[str, TensorPart]:
    return {name: TensorPart(array) for name, array in tensors.items()}
