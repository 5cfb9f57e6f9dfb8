"""The channel between rank 0 and another process: what is sent over it, and how it is read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isotrain.core.contracts.events import (
    Event,
    Failed,
    Finished,
    Heartbeat,
    ProcessEvent,
    WorkerLost,
)
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.contracts.reporter import BETWEEN_CALLS, Status
from isotrain.core.errors import IsotrainError
from isotrain.core.launching.run_directory.pipes import LineReader
from isotrain.core.launching.supervision.failure_diagnosis import RankStatus, suspicion
from isotrain.core.launching.supervision.supervisor import Supervisor
from isotrain.core.rendezvous.local_reporter import LocalReporter
from isotrain.core.rendezvous.rank_zero import heartbeats
from isotrain.core.rendezvous.remote_process import RemoteProcess
from isotrain.core.rendezvous.state_exchange import StateExchange
from isotrain.core.transport import connection as connection_module
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.connection import Connection
from isotrain.core.transport.message_auth import MacPair

LONG = 30.0
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        calling = socket.create_connection(server.getsockname())
        with server.accept()[0] as one, calling as other:
            yield one, other


def remote_process(ends: Ends, folder: Path) -> RemoteProcess:
    """Rank 1 as rank 0 monitors it, over one of the ends."""
    channel = Channel(Connection(ends[0]))
    exchange = StateExchange(0, {1: channel})
    return RemoteProcess(channel, process_info(1), ("127.0.0.1", 1), folder, exchange)


def test_a_half_message_is_not_completed_by_another(ends: Ends) -> None:
    one, other = ends
    other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    connection = Connection(other)
    channel = Channel(connection)
    connection.limit_sending(0.05)
    channel.send({"long": "x" * (1 << 24)})  # nobody reads: it gives up halfway
    whole_length = len(drained(one))
    channel.send({"short": 1})
    assert 0 < whole_length < 1 << 24
    assert drained(one) == b""
    assert channel.read() is None


def test_a_long_message_to_one_rank_does_not_silence_rank_0_for_the_others(ends: Ends) -> None:
    """As the state of an elastic run is: rank 1 reads it slowly, and rank 2 needs signs of life."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        calling = socket.create_connection(server.getsockname())
        accepted = server.accept()[0]
    connection = Connection(ends[0])
    slow, other, rank_2 = Channel(connection), Channel(Connection(accepted)), Connection(calling)
    connection.limit_sending(LONG)
    state = threading.Thread(target=slow.send, args=({"long": "x" * (1 << 25)},))
    state.start()
    ends[1].settimeout(LONG)
    assert ends[1].recv(1)  # it is being sent
    reporter = LocalReporter(0)
    with heartbeats(reporter, {1: slow, 2: other}, 0.01):
        message = Channel(rank_2).wait(LONG)
        assert state.is_alive()
        assert message is not None
        assert message[0]["do"] == "beat"
        ends[1].close()
        state.join(LONG)
    assert not state.is_alive()
    reporter.close()
    other.close()
    rank_2.close()


def drained(end: socket.socket) -> bytes:
    """What there is to read."""
    end.settimeout(LONG)
    found = end.recv(1 << 20)
    end.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while part := end.recv(1 << 20):
            found += part
    return found


def test_oversized_messages_are_not_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "UNAUTHENTICATED_LIMIT", 100)
    one, other = ends
    channel = Channel(Connection(other))
    with pytest.raises(IsotrainError, match=r"a message of 1[0-9]+ bytes cannot be sent"):
        channel.send({"long": "x" * 100})
    channel.send({"short": 1})
    assert Channel(Connection(one)).wait(LONG) == ({"short": 1}, [])


def test_unread_events_do_not_keep_a_process_from_ending() -> None:
    """A pipe is full, and the sender waits for no reader."""
    line = LocalReporter(0)
    long = Failed(error="E", message="x" * (1 << 20), traceback="", is_peer_error=False)
    telling = threading.Thread(target=line.reporter.emit, args=(long,))
    telling.start()
    line.close()
    telling.join()
    line.reporter.emit(long)  # goes nowhere


def process_info(rank: int, role: Any = "worker") -> ProcessInfo:
    return ProcessInfo(rank, f"n{rank}", 0, (rank - 1,), role)


def failed(rank: int, at: float, call: str = "step") -> Failed:
    event = Failed(rank=rank, time=at, error="E", message="", traceback="", is_peer_error=False)
    return replace(event, call=call)


def told(event: ProcessEvent, clock: float) -> dict[str, Any]:
    return {"event": event.to_line().decode().strip(), "status": [3, 0.0, "step"], "clock": clock}


def read_from(process: RemoteProcess) -> list[bytes]:
    while not (lines := process.read_lines()):
        time.sleep(0.001)
    return lines


def sealed(ends: Ends) -> tuple[Channel, socket.socket]:
    """One end as a channel with a MAC, and the other as a raw socket."""
    return Channel(Connection(ends[1], MacPair.derive(b"session", is_client=True))), ends[0]


def as_heard(*said: bytes) -> list[Any] | None:
    """What rank 0 makes of what has come, of each part before the next one comes; None: nothing."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        calling = stack.enter_context(socket.create_connection(server.getsockname()))
        channel = Channel(
            Connection(server.accept()[0], MacPair.derive(b"session", is_client=False))
        )
        stack.callback(channel.close)
        heard: list[Any] = []
        for part in said:
            calling.sendall(part)
            first = channel.wait(LONG)
            if first is not None:
                heard += [first[0], *(m for m, _ in channel.read() or ())]
        return heard or None


def test_modified_messages_are_rejected(ends: Ends) -> None:
    channel, between = sealed(ends)
    messages = []
    for number in range(2):
        channel.send({"number": number}, [np.arange(2.0)])
        messages.append(drained(between))
    one, two = messages
    assert as_heard(one + two) == [{"number": 0}, {"number": 1}]
    assert as_heard(one.replace(b'"number": 0', b'"number": 7')) is None
    assert as_heard(one[:-33] + bytes([one[-33] ^ 1]) + one[-32:]) is None  # in an array
    assert as_heard(two) is None  # without the one before
    assert as_heard(one, one) == [{"number": 0}]  # never twice


def test_parts_of_a_long_message_count_as_activity(ends: Ends, tmp_path: Path) -> None:
    process = remote_process(ends, tmp_path)
    ends[1].sendall((1 << 20).to_bytes(8, "big") + b" " * 100_000)
    before, deadline = process.activity, time.monotonic() + LONG
    while process.activity < before + 0.1 and time.monotonic() < deadline:
        assert process.read_lines() == []
    assert process.activity == pytest.approx(0.100008)


def test_times_of_failures_are_by_the_clock_of_rank_0(ends: Ends, tmp_path: Path) -> None:
    """Clocks of hosts differ, and the first failure is most likely the cause."""
    process = remote_process(ends, tmp_path)
    now, ahead = time.time(), 1000.0
    Channel(Connection(ends[1])).send(told(failed(1, now + ahead), now + ahead))
    (line,) = read_from(process)
    assert now <= json.loads(line)["time"] < now + ahead / 2


@pytest.mark.parametrize(
    ("seconds", "call", "culprit"),
    [
        (-2.0, "step", 1),
        (-0.1, "step", 2),
        (-0.1, BETWEEN_CALLS, 1),
        (0.1, BETWEEN_CALLS, 2),
        (2.0, "step", 2),
    ],
)
def test_a_lost_process_is_suspected_by_the_time_of_its_loss(
    seconds: float, call: str, culprit: int
) -> None:
    """Nobody here knows how it ended: by a kill that failed calls of others, or by the failure of another."""
    gone: Any = SimpleNamespace(
        info=process_info(2), exit_code=None, is_gone=True, is_stopped=False
    )
    raised: Any = SimpleNamespace(
        info=process_info(1), exit_code=None, is_gone=False, is_stopped=False
    )
    found = [
        RankStatus(
            raised, last_heard=0.0, last_active=0.0, failure=failed(1, 100.0 + seconds, call)
        ),
        RankStatus(gone, last_heard=0.0, last_active=0.0, died_at=100.0),
    ]
    assert min(found, key=suspicion).rank == culprit


def test_a_lost_worker_on_another_host_is_reported(ends: Ends, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    lines, events = LineReader(reading), list[Event]()
    first: Any = SimpleNamespace(
        info=process_info(0, "coordinator"),
        events=reading,
        read_lines=lines.read,
        status=Status(None, time.monotonic(), "step"),
        is_gone=False,
        output=None,
        exit_code=None,
        is_stopped=False,
        activity=0.0,
    )
    worker = remote_process(ends, tmp_path)
    timeouts = {"silence": LONG, "start": LONG, "progress": LONG}
    supervisor = Supervisor([first, worker], timeouts, events.append)
    ends[1].close()
    os.write(
        writing, WorkerLost(rank=0, lost_rank=1, lost_step=3, reason="it says nothing").to_line()
    )
    os.write(writing, b'{"event": "finished", "rank": 0, "time": 0, "step": 3, "call": "step"}\n')
    assert supervisor.run() is None
    (lost,) = (event for event in events if isinstance(event, WorkerLost))
    assert lost.cause == "is gone: its connection to rank 0 was closed"
    supervisor.drain()
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_one_event_does_not_poll_all_processes() -> None:
    """Of many processes, one always sends something."""
    reading, writing = os.pipe()

    class Counted:
        info, events, output = process_info(0, "replica"), reading, None
        status = Status(None, time.monotonic(), "step")
        exit_code, is_stopped, activity = None, False, 0.0
        read_lines = staticmethod(LineReader(reading).read)
        looked = 0

        @property
        def is_gone(self) -> bool:
            self.looked += 1
            return False

    def tell() -> None:
        for _ in range(300):
            os.write(writing, Heartbeat().to_line())
            time.sleep(0.001)
        os.write(writing, Finished().to_line())

    process: Any = Counted()
    thread = threading.Thread(target=tell)
    thread.start()
    timeouts = {"silence": LONG, "start": LONG, "progress": LONG}
    supervisor = Supervisor([process], timeouts, lambda event: None, poll_seconds=LONG)
    assert supervisor.run() is None  # it is looked at for news alone
    thread.join()
    assert process.looked < 10
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_large_values_are_returned_whole(ends: Ends) -> None:
    """They travel as JSON, and as an array beside it."""
    value = {"texts": ["x" * 1000] * 20_000}
    sending = threading.Thread(
        target=Channel(Connection(ends[1])).send, args=(value, [np.arange(3)])
    )
    sending.start()
    found = Channel(Connection(ends[0])).wait(LONG)
    sending.join()
    assert found is not None
    assert found[0] == value
    np.testing.assert_array_equal(found[1][0], np.arange(3))
