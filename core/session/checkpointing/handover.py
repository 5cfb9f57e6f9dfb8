"""Handover of a session's state to the next process group of an elastic run, through a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.tensor_part import Section
from isotrain.core.contracts.membership import Membership
from isotrain.core.errors import CheckpointError, PeerLostError
from isotrain.core.json_format import json_line
from isotrain.core.session.checkpointing.state_snapshot import replica_section

TENSOR_BYTES = 512
"""Limit for the description of a tensor in the files beside it, without its name."""
_COMMIT_SECONDS = 60.0
"""Time for which the source waits for the parts of the other members, all of which are alive."""


@dataclass(frozen=True)
class CarriedState:
    """State of one process of an elastic run between two process groups.

    Attributes:
        replica: Index of this process's replica in the group that it has left.
        done: Number of steps in the state; -1 in a process that joins, and has none yet.
        phase: Number of parts of the built-in loop that are done after the last of them.
        run: Content of `run.json`, as in a checkpoint.
        sections: State that is equal on all replicas, as in a checkpoint.
        metrics: Training metrics of this replica over the steps that are done.
        metrics_of_next: The same with this replica's samples of the step that was broken off, if one was.
    """

    replica: int
    done: int
    phase: int
    run: Mapping[str, Any]
    sections: Mapping[str, Section]
    metrics: Section
    metrics_of_next: Section

    @classmethod
    def none(cls) -> CarriedState:
        """State of a process that joins: none."""
        return cls(0, -1, 0, {}, {}, {}, {})

    @property
    def nbytes(self) -> int:
        """Bytes of what the source writes for all: the equal state, and `run.json`."""
        return sum(map(_stored_bytes, self.sections.values())) + len(json_line(self.run))

    @property
    def metrics_nbytes(self) -> int:
        """Bytes of the metrics, which each member writes."""
        return max(_stored_bytes(self.metrics), _stored_bytes(self.metrics_of_next))

    def hand_over(self, membership: Membership, member: int, is_void: Callable[[], bool]) -> str:
        """Writes this process's part of the state with which a new process group begins.

        The source writes what is equal on all replicas, and waits for the metrics of the others: sums, which
        the new replicas divide among themselves. They are dropped if the source has collected them already.

        Args:
            membership: Members of the new group.
            member: First rank of this process.
            is_void: Whether the new group has lost a member already.

        Returns:
            Location of the state, which is complete once the group is formed.

        Raises:
            PeerLostError: A member is lost.
        """
        folder = CheckpointFolder(f"{membership.folder}/{membership.generation}")
        is_source, step = member == membership.source, membership.done
        token = f"generation-{membership.generation}"
        sections = dict(self.sections) if is_source else {}
        if not membership.phase:
            metrics = self.metrics if self.done == step else self.metrics_of_next
            sections |= {replica_section(self.replica, 0): metrics} if metrics else {}
        folder.write(step, token=token, writer=membership.members.index(member), sections=sections)
        if is_source:
            try:
                folder.commit(
                    step,
                    token=token,
                    writers=len(membership.members),
                    run=self.run,
                    timeout_s=_COMMIT_SECONDS,
                    given_up=is_void,
                )
            except CheckpointError as error:
                raise PeerLostError(f"the state was not handed over: {error}") from error
        return folder.location


def _stored_bytes(section: Section) -> int:
    """Bytes of a section's tensors in a checkpoint, with their names and descriptions."""
    return sum(part.nbytes + 2 * len(name) + TENSOR_BYTES for name, part in section.items())
