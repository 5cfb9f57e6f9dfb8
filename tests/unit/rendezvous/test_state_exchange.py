"""State of an elastic run on several hosts: who gets what from whom, and what each of them has then."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.contracts.membership import Membership
from isotrain.core.errors import PeerLostError
from isotrain.core.rendezvous.state_exchange import StateExchange
from isotrain.core.session.checkpointing.handover import CarriedState
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.connection import Connection

STATE_BYTES = 1 << 20
MEMBERS = (0, 2, 3, 5)
DONE = {0: {0: 7, 2: 6, 3: 7, 5: 7}, 3: {0: 6, 2: 6, 3: 7, 5: 7}}
"""Steps that each member has done, by the source: the first of those that have done most."""


class Hosts:
    """Processes with channels to rank 0, each with a thread that reads them.

    Attributes:
        exchanges: By rank.
        channels: The end of each rank but 0, by rank.
    """

    def __init__(self, cleanup: ExitStack) -> None:
        self.channels: dict[int, Channel] = {}
        self._of_rank_0: dict[int, Channel] = {}
        for rank in MEMBERS[1:]:
            with socket.create_server(("127.0.0.1", 0)) as server:
                one = cleanup.enter_context(socket.create_connection(server.getsockname()))
                other = cleanup.enter_context(server.accept()[0])
            self._of_rank_0[rank] = Channel(Connection(one))
            self.channels[rank] = Channel(Connection(other))
        self.exchanges = {0: StateExchange(0, self._of_rank_0)}
        for rank, channel in self.channels.items():
            self.exchanges[rank] = StateExchange(rank, {0: channel})
        self._ended = threading.Event()
        reader = threading.Thread(target=self._read)
        reader.start()
        cleanup.callback(reader.join)
        cleanup.callback(self._ended.set)

    def _read(self) -> None:
        while not self._ended.wait(0.001):
            for rank, channel in self._of_rank_0.items():
                for message, arrays in channel.read() or ():
                    self.exchanges[0].receive(message, arrays)
                for message, arrays in self.channels[rank].read() or ():
                    self.exchanges[rank].receive(message, arrays)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ExitStack() as cleanup:
        yield Hosts(cleanup)


def membership(source: int, collected: bool = False) -> Membership:
    done = DONE[source][source]
    behind = tuple(rank for rank, steps in DONE[source].items() if steps < done)
    ports = tuple(range(len(MEMBERS)))
    return Membership(1, MEMBERS, ports, source, behind, done, collected, 4, 0, 0, None)


def carried(rank: int, source: int) -> CarriedState:
    """State of a member; its sums tell by whom, and whether the next step is in them."""
    done = DONE[source][rank]
    sums, with_next = ({"metrics/loss": TensorPart(np.full(2, 10.0 * rank + n))} for n in (0, 1))
    weights = {
        "w": TensorPart(np.full(STATE_BYTES // 8, float(done))),
        "half": TensorPart(np.full((2, 3), 0.5 + done, np.float32), dtype="bfloat16"),
        "scalar": TensorPart(np.array(done)),
    }
    run = {"done": done, "of": rank, "loss": float("nan")}
    return CarriedState(rank, done, 0, False, False, run, {"state": weights}, sums, with_next)


def filled(folder: Path) -> Callable[[int, int, Callable[[str], None]], str]:
    """A state is written into this folder."""

    def fill(size: int, writers: int, write: Callable[[str], None]) -> str:
        write(str(folder))
        return str(folder)

    return fill


def handed_over(hosts: Hosts, agreed: Membership, folder: Path) -> dict[int, CheckpointFolder]:
    """What each member has afterwards."""

    def hand_over(rank: int) -> CheckpointFolder:
        own = folder / str(rank)
        own.mkdir()
        exchange = hosts.exchanges[rank]
        location = carried(rank, agreed.source).exchange(
            agreed, rank, lambda: False, exchange, filled(own)
        )
        return CheckpointFolder(location)

    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        return dict(zip(MEMBERS, pool.map(hand_over, MEMBERS), strict=True))


def content(folder: CheckpointFolder) -> tuple[Mapping[str, Any], dict[str, dict[str, Any]]]:
    """Record of the run, and all tensors as lists."""
    checkpoint = folder.newest()
    assert checkpoint is not None
    assert checkpoint.step == 7
    sections = {
        section: {name: array.tolist() for name, array in checkpoint.read(section).items()}
        for section in checkpoint.sections()
    }
    return checkpoint.run, sections


@pytest.mark.parametrize("source", [0, 3])
@pytest.mark.parametrize("collected", [False, True])
def test_every_member_has_the_whole_state_and_only_who_is_behind_gets_it(
    hosts: Hosts, tmp_path: Path, source: int, collected: bool
) -> None:
    found = handed_over(hosts, membership(source, collected), tmp_path)
    contents = {rank: content(folder) for rank, folder in found.items()}
    run, sections = contents[2]
    assert all(each == (run, sections) for each in contents.values())
    assert run["of"] == source
    assert sections["state"]["w"] == [7.0] * (STATE_BYTES // 8)
    assert sections["state"]["half"] == [[7.5] * 3] * 2
    assert sections["state"]["scalar"] == 7
    sums = {name: each["metrics/loss"] for name, each in sections.items() if name != "state"}
    of_rank_0 = 0.0 if source == 0 else 1.0  # of the step that it broke off
    expected = {"replica-0": of_rank_0, "replica-2": 21.0, "replica-3": 30.0, "replica-5": 50.0}
    assert sums == ({} if collected else {name: [each] * 2 for name, each in expected.items()})
    received = {rank: channel.received for rank, channel in hosts.channels.items()}
    assert received[2] > STATE_BYTES
    assert max(received[3], received[5]) < STATE_BYTES // 10


def test_a_lost_member_ends_the_wait_of_the_others(hosts: Hosts, tmp_path: Path) -> None:
    """Rank 5 gives nothing; the next group, without it, is not disturbed by what was sent in this one."""
    void = threading.Event()

    def hand_over(rank: int) -> None:
        exchange = hosts.exchanges[rank]
        carried(rank, 3).exchange(membership(3), rank, void.is_set, exchange, lambda *_: "")

    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        waiting: list[Future[None]] = [pool.submit(hand_over, rank) for rank in (0, 2, 3)]
        time.sleep(0.05)
        assert not any(each.done() for each in waiting)
        void.set()
        for each in waiting:
            with pytest.raises(PeerLostError, match="a member is lost"):
                each.result()
    fields = vars(membership(0)) | {"generation": 2, "members": MEMBERS[:3], "ports": (1, 2, 3)}
    again = Membership(**fields)

    def take(rank: int) -> tuple[Any, Any]:
        own = tmp_path / str(rank)
        own.mkdir()
        exchange = hosts.exchanges[rank]
        location = carried(rank, 0).exchange(again, rank, lambda: False, exchange, filled(own))
        return content(CheckpointFolder(location))

    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        zero, two, three = pool.map(take, MEMBERS[:3])
    assert zero == two == three
    assert zero[0]["of"] == 0
