"""How the processes of a parameter-server run find each other, and what travels between them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from isotrain.core.contracts.process import ProcessContext, ProcessInfo, ServerConnection
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data.pytree import Weighted, decode_tree, encode_tree
from isotrain.core.errors import PeerLostError
from isotrain.core.parameter_server.worker import serve
from isotrain.core.transport import auth
from isotrain.core.transport.connection import Connection, ConnectionLostError, connect
from isotrain.core.transport.server import (
    AuthenticatedServer,
    ConnectionRejectedError,
    PendingConnection,
)

KEY = b"the secret of one run, 32 bytes."
LOOPBACK = ("127.0.0.1", 0)
LONG = 120.0
"""Seconds of patience with strangers: a test in which anybody waited for one would not end in time."""
IN_TIME = 30.0
WORKERS = 4


@contextlib.contextmanager
def listening(patience: float = LONG, places: int = 256) -> Iterator[AuthenticatedServer]:
    made = AuthenticatedServer(LOOPBACK, KEY, patience, places)
    yield made
    made.close()


def service(
    address: tuple[str, int], rank: int = 1, key: bytes = KEY, patience: float = IN_TIME
) -> ServerConnection:
    """A worker's, which calls again for so many seconds."""
    worker = ProcessInfo(rank, "here", rank, (), "worker")
    context = ProcessContext(rank, 4, "", (worker,), (("127.0.0.1", 0),), (address,))
    return ServerConnection(context, key, patience, 1.0, Reporter())


def call(address: tuple[str, int], rank: int = 1) -> Connection:
    """Connects as a worker does."""
    return connect(service(address, rank))


def arrived(at: AuthenticatedServer, count: int) -> dict[int, Connection]:
    found: dict[int, Connection] = {}
    end = time.monotonic() + IN_TIME
    while len(found) < count and time.monotonic() < end:
        found.update(at.arrivals())
        time.sleep(0.01)
    return found


def require_entry(at: AuthenticatedServer) -> None:
    """Lets real workers call, all at once, and sees that each gets in and is the one it says it is."""
    with ThreadPoolExecutor(WORKERS) as pool:
        calls = [pool.submit(call, at.address, rank) for rank in range(1, WORKERS + 1)]
        inside = arrived(at, WORKERS)
        assert sorted(inside) == [1, 2, 3, 4]
        for rank, calling in enumerate(calls, 1):
            outside = calling.result(IN_TIME)
            outside.send({"rank": rank})
            assert inside[rank].receive()[0] == {"rank": rank}
            outside.close()
            inside[rank].close()


def raw_connection(at: AuthenticatedServer) -> socket.socket:
    return socket.create_connection(at.address, timeout=IN_TIME)


def is_dropped(one: socket.socket) -> bool:
    """Waits until the other end has closed; what it says until then is only its greeting."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while part := one.recv(4096):
            heard += part
    one.close()
    return len(heard) <= auth.CHALLENGE_BYTES


def test_workers_connect_beside_many_silent_connections() -> None:
    with listening() as at:
        connections = [raw_connection(at) for _ in range(100)]
        require_entry(at)
        for one in connections:
            one.close()


def drip(one: socket.socket, text: bytes) -> int:
    """Sends a byte now and then; returns how many until it was dropped."""
    for count, byte in enumerate(text):
        try:
            one.sendall(bytes([byte]))
            one.recv(auth.CHALLENGE_BYTES)  # the greeting, then what there is: nothing
        except TimeoutError:
            continue
        except OSError:
            return count
    return len(text)


def test_a_trickling_client_is_dropped_and_delays_nobody() -> None:
    with listening(patience=0.5) as at, ThreadPoolExecutor(1) as pool:
        one = raw_connection(at)
        one.settimeout(0.05)
        begun = auth.answer_challenge(bytes(32), KEY, 1)  # each byte may be that of a worker
        dripping = pool.submit(drip, one, begun)
        require_entry(at)
        assert dripping.result(IN_TIME) < len(begun)
        one.close()


def test_a_silent_connection_is_dropped_without_others() -> None:
    with listening(patience=0.1) as at:
        assert is_dropped(raw_connection(at))


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(struct.pack("!Q", 1 << 62), id="a huge length"),
        pytest.param(b"\x00", id="one byte"),
        pytest.param(os.urandom(1 << 20), id="a mebibyte"),
        pytest.param(auth.answer_challenge(bytes(32), KEY, 1), id="an answer to another greeting"),
    ],
)
def test_a_foreign_client_is_dropped_at_once(said: bytes) -> None:
    with listening() as at:
        one = raw_connection(at)
        with contextlib.suppress(OSError):  # dropped before all of it is sent
            one.sendall(said)
        assert is_dropped(one)
        require_entry(at)
        assert at.arrivals() == []


def test_a_client_that_leaves_is_forgotten() -> None:
    """Its place is free again."""
    with listening(places=1) as at:
        raw_connection(at).close()
        require_entry(at)


def test_more_connections_than_places_only_delay() -> None:
    with listening(patience=0.1, places=4) as at:
        connections = [raw_connection(at) for _ in range(40)]
        require_entry(at)
        assert all(is_dropped(one) for one in connections)


def overheard(at: AuthenticatedServer) -> tuple[bytes, bytes]:
    """What a worker and the door say to each other until the worker is in, by way of a listener between."""
    with socket.create_server(LOOPBACK) as between, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, between.getsockname())
        worker, _ = between.accept()
        with worker, raw_connection(at) as to_server:
            greeting = receive(to_server, auth.CHALLENGE_BYTES)
            worker.sendall(greeting)
            answer = receive(worker, auth.ANSWER_BYTES)
            to_server.sendall(answer)
            confirmation = receive(to_server, auth.CONFIRMATION_BYTES)
            worker.sendall(confirmation)
            calling.result(IN_TIME).close()
    return greeting + confirmation, answer


def receive(connection: socket.socket, length: int) -> bytes:
    connection.settimeout(IN_TIME)
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        assert part
        data += part
    return data


def test_the_key_never_travels() -> None:
    with listening() as at:
        for said in overheard(at):
            for cut in range(len(KEY) - 7):
                assert KEY[cut : cut + 8] not in said
                assert KEY[cut : cut + 8].hex().encode() not in said


def test_a_replayed_handshake_is_rejected() -> None:
    with listening() as at:
        _, answer = overheard(at)
        for _, connection in arrived(at, 1).items():
            connection.close()
        with raw_connection(at) as later:
            later.sendall(answer)
            assert is_dropped(later)
        assert at.arrivals() == []


def test_a_client_with_another_key_is_rejected() -> None:
    with listening() as at:
        with pytest.raises(ConnectionLostError, match="belongs to another run"):
            connect(service(at.address, key=b"a guess", patience=0.2))
        assert at.arrivals() == []


def test_a_dropped_worker_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, stalls = auth.answer_challenge, [1.0]

    def answer_to(*asked: Any) -> bytes:
        if stalls:
            time.sleep(stalls.pop())
        return prompt(*asked)

    monkeypatch.setattr(auth, "answer_challenge", answer_to)
    with listening(patience=0.1) as at:
        outside = call(at.address, rank=3)
        (inside,) = arrived(at, 1).items()
        assert inside[0] == 3
        outside.close()
        inside[1].close()


def test_a_rejected_worker_has_not_finished() -> None:
    """The coordinator ends in the middle of the handshake."""
    with socket.create_server(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool:
        work = pool.submit(serve, service(listener.getsockname()), build=None)
        connection, _ = listener.accept()
        listener.close()
        connection.close()
        with pytest.raises(PeerLostError, match="is gone"):
            work.result(IN_TIME)


@pytest.mark.parametrize(
    "reply", [bytes(auth.CONFIRMATION_BYTES), None], ids=["zeros", "its own proof"]
)
def test_a_coordinator_without_the_key_is_rejected(reply: bytes | None) -> None:
    with socket.create_server(LOOPBACK) as listener, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(auth.CHALLENGE_BYTES))
            answer = receive(connection, auth.ANSWER_BYTES)
            connection.sendall(reply or answer[-auth.CONFIRMATION_BYTES :])
            with pytest.raises(ConnectionLostError, match="belongs to another run"):
                calling.result(IN_TIME)


def test_challenges_and_answers_are_never_repeated() -> None:
    assert len({auth.new_challenge() for _ in range(100)}) == 100
    assert len({auth.answer_challenge(bytes(32), KEY, 1) for _ in range(100)}) == 100


def test_a_client_cannot_take_another_rank() -> None:
    greeting = auth.new_challenge()
    answer = bytearray(auth.answer_challenge(greeting, KEY, 1))
    assert auth.verify_answer(greeting, bytes(answer), KEY) == 1
    for place in range(len(answer)):
        answer[place] ^= 1
        assert auth.verify_answer(greeting, bytes(answer), KEY) is None
        answer[place] ^= 1


def test_an_unexpected_message_rejects_no_other_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening() as at:
        with monkeypatch.context() as patched, raw_connection(at) as one:
            patched.setattr(auth, "is_answer_prefix", lambda received: 1 / 0)
            one.sendall(b"x")
            assert is_dropped(one)
        require_entry(at)


def test_a_client_that_reads_nothing_is_dropped() -> None:
    here, there = socket.socketpair()
    with here, there:
        pending = PendingConnection(here, time.monotonic() + LONG, KEY, None)
        greeting = there.recv(auth.CHALLENGE_BYTES)
        with contextlib.suppress(BlockingIOError):
            while here.send(b"x" * 4096):
                pass
        there.sendall(auth.answer_challenge(greeting, KEY, 1))
        with pytest.raises(ConnectionRejectedError):
            pending.on_readable()


def test_a_closed_server_accepts_nobody() -> None:
    with listening() as at:
        waiting = raw_connection(at)
    assert is_dropped(waiting)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(at.address)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with (
        socket.create_server(LOOPBACK) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        yield one, other


def test_arrays_arrive_as_they_were_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = map(Connection, ends)
    arrays: list[np.ndarray] = []
    tree = ({"a": np.arange(6).reshape(2, 3).T, "b": np.zeros((0, 3))}, np.float32(1.5), None)
    tree = (*tree, Weighted(np.arange(3), (np.ones(3),)))
    plain = encode_tree(tree, arrays)
    one.send({"tree": plain, "step": 3}, arrays)
    header, received = other.receive()
    found = decode_tree(header["tree"], received)
    assert header["step"] == 3
    np.testing.assert_array_equal(found[0]["a"], tree[0]["a"])
    assert found[0]["b"].shape == (0, 3)
    assert (found[1], found[1].dtype, found[2]) == (1.5, np.float32, None)
    assert isinstance(found[3], Weighted)
    np.testing.assert_array_equal(found[3].weights[0], np.ones(3))
    one.close()
    with pytest.raises(ConnectionLostError, match="closed"):
        other.receive()


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b'{"arrays": [["|O", [1]]]}', id="an array of objects"),
        pytest.param(b"[", id="no JSON"),
        pytest.param(b"{}", id="no arrays"),
        pytest.param(None, id="a huge length"),
    ],
)
def test_a_malformed_message_is_refused(
    said: bytes | None, ends: tuple[socket.socket, socket.socket]
) -> None:
    length = 1 << 40 if said is None else len(said)
    ends[0].sendall(struct.pack("!Q", length) + (said or b"") + b"12345678")
    with pytest.raises(ConnectionLostError):
        Connection(ends[1]).receive()
