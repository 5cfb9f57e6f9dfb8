"""Exchange of the state of an elastic run between processes on several hosts, through rank 0."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.contracts.membership import Membership
from isotrain.core.errors import PeerLostError
from isotrain.core.session.checkpointing.handover import MemberState
from isotrain.core.transport.channel import Channel

_POLL_SECONDS = 0.01
_Sections = dict[str, dict[str, TensorPart]]


@dataclass
class _Received:
    """Part of one member, as far as it has arrived."""

    run: Mapping[str, Any] | None = None
    sections: dict[str, _Sections] = field(default_factory=lambda: {"equal": {}, "own": {}})
    is_complete: bool = False


class StateExchange:
    """Sends what each member gives to rank 0, which sends it to the others; see the protocol of this name.

    Each tensor is a message, between which other messages are sent.
    """

    def __init__(self, rank: int, channels: Mapping[int, Channel]) -> None:
        """Begins without messages.

        Args:
            rank: Rank of this process at the start of the run.
            channels: Rank to channel: on rank 0 those of all others, elsewhere that of rank 0.
        """
        self._rank = rank
        self._channels = channels
        self._received: dict[tuple[int, int], _Received] = {}
        """Generation and member to what has arrived."""
        self._arrival = threading.Condition()

    def receive(self, message: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
        """Takes a message of another process's `exchange`; called by the thread that reads the channels."""
        generation, member = message["part"]
        with self._arrival:
            received = self._received.setdefault((generation, member), _Received())
            if "run" in message:
                received.run, received.is_complete = message["run"], True
                self._arrival.notify_all()
                return
            section = received.sections[message["kind"]].setdefault(message["section"], {})
            (array,) = arrays
            shape, offset = tuple(message["shape"]), tuple(message["offset"])
            section[message["tensor"]] = TensorPart(array, message["dtype"], shape, offset)

    def exchange(
        self, membership: Membership, own: MemberState, is_void: Callable[[], bool]
    ) -> Mapping[int, MemberState]:
        """Returns the part of each member, by first rank. Collective; called by the thread that trains.

        Raises:
            PeerLostError: A member is lost.
        """
        rank, generation = self._rank, membership.generation
        if rank:
            self._send(0, membership, rank, own)
        others = [member for member in membership.members if member != rank]
        parts = {member: self._await(generation, member, is_void) for member in others}
        parts[rank] = own
        if not rank:
            for receiver in others:
                for sender in membership.members:
                    if sender != receiver:
                        self._send(receiver, membership, sender, parts[sender])
        with self._arrival:
            self._received = {
                key: each for key, each in self._received.items() if key[0] > generation
            }
        return parts

    def _await(self, generation: int, member: int, is_void: Callable[[], bool]) -> MemberState:
        key = generation, member
        with self._arrival:
            while key not in self._received or not self._received[key].is_complete:
                if is_void():
                    raise PeerLostError("the state was not handed over: a member is lost")
                self._arrival.wait(_POLL_SECONDS)
            received = self._received[key]
        return MemberState(received.run, received.sections["equal"], received.sections["own"])

    def _send(self, receiver: int, membership: Membership, sender: int, state: MemberState) -> None:
        """Sends what a member gives; equal state only to who is behind.

        Rank 0 is the source unless it is behind, so it has that state for the others.
        """
        channel = self._channels[receiver]
        head = {"do": "state", "part": [membership.generation, sender]}
        is_behind = receiver in membership.behind
        kinds = {"equal": state.equal if is_behind else {}, "own": state.own}
        for kind, sections in kinds.items():
            for section, tensors in sections.items():
                for name, part in tensors.items():
                    place = {"kind": kind, "section": section, "tensor": name}
                    shapes = {"shape": part.global_shape, "offset": part.offset}
                    channel.send({**head, **place, "dtype": part.dtype, **shapes}, [part.array])
        channel.send({**head, "run": state.run})
