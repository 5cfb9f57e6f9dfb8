"""Handover of a session's state to the next process group of an elastic run, through folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
class MemberState:
    """Part of a member in the state with which the next process group begins.

    Attributes:
        run: Content of `run.json`, from the source; None from the others.
        equal: State that is equal on all replicas, from the source. Empty where nobody needs it.
        own: Metrics of the member's replica.
    """

    run: Mapping[str, Any] | None
    equal: Mapping[str, Section]
    own: Mapping[str, Section]

    @property
    def nbytes(self) -> int:
        """Limit for its bytes in a folder."""
        sections = sum(map(_stored_bytes, (*self.equal.values(), *self.own.values())))
        return sections + (0 if self.run is None else len(json_line(self.run)))


class StateExchange(Protocol):
    """Exchange of what the members give, where they have no folder in common."""

    def exchange(
        self, membership: Membership, own: MemberState, is_void: Callable[[], bool]
    ) -> Mapping[int, MemberState]:
        """Returns the part of each member. Collective.

        Members that are not behind get no equal state.

        Args:
            membership: Members of the new group.
            own: What this process gives.
            is_void: Whether the new group has lost a member already.

        Raises:
            PeerLostError: A member is lost.
        """


@dataclass(frozen=True)
class CarriedState:
    """State of one process of an elastic run between two process groups.

    Attributes:
        replica: Index of this process's replica in the group that it has left.
        done: Number of steps in the state; -1 in a process that joins, and has none yet.
        phase: Number of parts of the built-in loop that are done after the last of them.
        metrics_collected: Whether the metrics of the epoch, which ends with it, are reduced already.
        replicas_differ: Whether others may have other optimizer state after as many steps.
        run: Content of `run.json`, as in a checkpoint.
        sections: State that is equal on all replicas, as in a checkpoint.
        metrics: Training metrics of this replica over the steps that are done.
        metrics_of_next: The same with this replica's samples of the step that was broken off, if one was.
    """

    replica: int
    done: int
    phase: int
    metrics_collected: bool
    replicas_differ: bool
    run: Mapping[str, Any]
    sections: Mapping[str, Section]
    metrics: Section
    metrics_of_next: Section

    @classmethod
    def none(cls) -> CarriedState:
        """State of a process that joins: none."""
        return cls(0, -1, 0, False, False, {}, {}, {}, {})

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
        folder = _folder(str(membership.folder), membership)
        step, token = membership.done, _token(membership)
        given = self._given(membership, member)
        sections = {**given.equal, **given.own}
        folder.write(step, token=token, writer=membership.members.index(member), sections=sections)
        if given.run is not None:
            try:
                folder.commit(
                    step,
                    token=token,
                    writers=len(membership.members),
                    run=given.run,
                    timeout_s=_COMMIT_SECONDS,
                    given_up=is_void,
                )
            except CheckpointError as error:
                raise PeerLostError(f"the state was not handed over: {error}") from error
        return folder.location

    def exchange(
        self,
        membership: Membership,
        member: int,
        is_void: Callable[[], bool],
        exchange: StateExchange,
        fill_folder: Callable[[int, int, Callable[[str], None]], str],
    ) -> str:
        """Sends this process's part of the state, and writes all parts into a folder of its own.

        A member that is as far as the source keeps the equal state that it has.

        Args:
            membership: Members of the new group.
            member: First rank of this process.
            is_void: Whether the new group has lost a member already.
            exchange: Sends and receives.
            fill_folder: Makes a folder for so many bytes in so many parts, and has them written into it.

        Returns:
            Location of the state.

        Raises:
            PeerLostError: A member is lost.
            RunFailedError: The state fits nowhere.
        """
        parts = dict(exchange.exchange(membership, self._given(membership, member), is_void))
        source = parts[membership.source]
        if member not in membership.behind:
            source = parts[membership.source] = replace(source, equal=self.sections)
        size, writers = sum(each.nbytes for each in parts.values()), len(membership.members)
        step, token = membership.done, _token(membership)
        run = source.run
        assert run is not None

        def write(parent: str) -> None:
            folder = _folder(parent, membership)
            for writer, each in enumerate(membership.members):
                sections = {**parts[each].equal, **parts[each].own}
                folder.write(step, token=token, writer=writer, sections=sections)
            folder.commit(step, token=token, writers=writers, run=run, timeout_s=0.0)

        return _folder(fill_folder(size, writers, write), membership).location

    def _given(self, membership: Membership, member: int) -> MemberState:
        is_source = member == membership.source
        metrics: Section = {}
        if not membership.metrics_collected:
            is_done = self.done == membership.done
            metrics = self.metrics if is_done else self.metrics_of_next
        return MemberState(
            run=self.run if is_source else None,
            equal=self.sections if is_source else {},
            own={replica_section(self.replica, 0): metrics} if metrics else {},
        )


def _folder(parent: str, membership: Membership) -> CheckpointFolder:
    return CheckpointFolder(f"{parent}/{membership.generation}")


def _token(membership: Membership) -> str:
    return f"generation-{membership.generation}"


def _stored_bytes(section: Section) -> int:
    """Bytes of a section's tensors in a checkpoint, with their names and descriptions."""
    return sum(part.nbytes + 2 * len(name) + TENSOR_BYTES for name, part in section.items())
