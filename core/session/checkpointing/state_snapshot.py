"""State snapshots for checkpoints: copies begun between two steps and finished during the next one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.core.checkpoints.tensor_part import Section, TensorPart
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.device_mesh import DATA, TENSOR
from isotrain.core.contracts.state import MODEL_STATE, StateInfo, StateKind
from isotrain.core.contracts.strategy import StrategyState
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.weights.weights_file import WEIGHTS

_REPLICA_PREFIX = "replica-"


def replica_section(replica: int, process: int) -> str:
    """Name of the checkpoint section of a replica's pipeline process; process 0 without a pipeline."""
    return f"{_REPLICA_PREFIX}{replica}" + (f"-stage-{process}" if process else "")


def replica_sections(sections: Iterable[str]) -> list[str]:
    """The sections of replicas among a checkpoint's sections, in their order."""
    return [section for section in sections if section.startswith(_REPLICA_PREFIX)]


REPLICATED_STATE: tuple[StateKind, ...] = (*MODEL_STATE, "loss-scale")
"""Kinds of state that are equal on all replicas if the weights are."""
REPLICA_STATE: tuple[StateKind, ...] = ("random", "metrics", "execution", "carry")
"""Kinds of state that each replica has for itself."""
PendingCopy = Callable[[], Section]
"""Finishes the copy of a section, and returns it."""


class StateSnapshot:
    """Copies one process's part of the state of a run, section by section; reuses its buffers."""

    def __init__(self, session_context: SessionContext, rank: int) -> None:
        """Reads the layout of the run; copies nothing yet."""
        self._group = session_context.group
        self._mesh = session_context.plan.device_mesh
        self._index_in_replica = session_context.index_in_replica
        self._rank = rank
        self._buffers: dict[int | None, dict[str, np.ndarray]] = {}

    @property
    def has_weights_to_write(self) -> bool:
        """Whether this process writes weights that are equal on all replicas, or a part of them."""
        return not self._rank or (self._is_first_copy and TENSOR in self._mesh.sizes)

    @property
    def _is_first_copy(self) -> bool:
        """Whether this process is the first of those that hold the same state."""
        return not self._mesh.index_in_group(self._rank, DATA)

    def weights(self) -> Section:
        """Copies the weights of this process's first replica; on other ranks than 0 its parts of these."""
        infos = self._group.describe_state(WEIGHTS)
        return {
            n: _part(array, infos[n])
            for n, array in self._group.read_state(WEIGHTS).items()
            if not self._rank or infos[n].offset is not None
        }

    def begin_copies(
        self, replicas_differ: bool, strategy_state: StrategyState
    ) -> dict[str, PendingCopy]:
        """Begins to copy each section; the next update of the group waits until all copies are finished."""
        copies: dict[str, PendingCopy] = {}
        try:
            self._begin(copies, replicas_differ, strategy_state)
        except BaseException:
            finish_copies(copies)
            raise
        return copies

    def _begin(
        self,
        copies: dict[str, PendingCopy],
        replicas_differ: bool,
        strategy_state: StrategyState,
    ) -> None:
        group = self._group
        kinds = (*REPLICATED_STATE, *REPLICA_STATE) if replicas_differ else REPLICA_STATE
        if not self._rank:
            copies["strategy"] = functools.partial(as_parts, strategy_state.tensors)
        for replica, tensors in strategy_state.per_replica.items():
            copies[f"strategy-{replica}"] = functools.partial(as_parts, tensors)
        if not replicas_differ and self._is_first_copy:
            copies["state"] = self._shared_state()
        if self._mesh.coordinates(self._rank).get(TENSOR):
            return  # the first process of the replica has the same
        for replica in group.local_replicas:
            copies[replica_section(replica, self._index_in_replica)] = self._parts(kinds, replica)

    def _shared_state(self) -> PendingCopy:
        """The part of the replicated or sharded state that this process writes.

        Rank 0 writes replicated tensors; each shard is written by one of the processes that have it.
        """
        rank, kinds = self._rank, REPLICATED_STATE
        if rank:
            kinds = tuple(kind for kind in kinds if self._is_sharded(kind))
        copy, infos = self._parts(kinds, None), self._group.describe_state(kinds)
        return lambda: {
            n: part for n, part in copy().items() if infos[n].offset is not None or not rank
        }

    def _parts(self, kinds: tuple[StateKind, ...], replica: int | None) -> PendingCopy:
        """Begins to copy state into the buffers of the last copy, which is written by now."""
        infos = self._group.describe_state(kinds, replica=replica)
        buffers = self._buffers.setdefault(replica, {})
        copy = self._group.copy_state(kinds, buffers, replica=replica)
        return lambda: {name: _part(array, infos[name]) for name, array in copy().items()}

    def _is_sharded(self, kind: StateKind) -> bool:
        infos = self._group.describe_state((kind,)).values()
        return any(info.offset is not None for info in infos)


def read_section(group: ReplicaGroup, kinds: Sequence[StateKind]) -> Section:
    """Copies unsharded state of this process's first replica. Local."""
    infos = group.describe_state(kinds)
    return {name: _part(array, infos[name]) for name, array in group.read_state(kinds).items()}


def finished_copy(section: Section) -> PendingCopy:
    """Wraps a copied section as a pending copy."""
    return lambda: section


def finish_copies(copies: Mapping[str, PendingCopy]) -> dict[str, Section]:
    """Finishes all copies, even if one fails: the group waits for each. Drops empty sections."""
    sections, errors = dict[str, Section](), []
    for name, copy in copies.items():
        try:
            sections[name] = copy()
        except Exception as error:  # no memory
            errors.append(error)
    if errors:
        raise errors[0]
    return {name: section for name, section in sections.items() if section}


def _part(array: np.ndarray, info: StateInfo) -> TensorPart:
    """Checkpoint record of an array: a shard of shape `info.shard_shape`, or a tensor of any shape."""
    if info.offset is None:
        return TensorPart(array, info.dtype)
    return TensorPart(array, info.dtype, info.shape, info.offset)


def as_parts(tensors: Mapping[str, Any]) -> dict[str, TensorPart]:
    """Checkpoint section of unsharded arrays, any shapes, by name."""
    return {name: TensorPart(array) for name, array in tensors.items()}
