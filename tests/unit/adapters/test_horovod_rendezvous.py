"""The rendezvous of Horovod's processes, which elastic runs interrupt where a process is lost."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("horovod")
from isotrain.adapters.horovod import rendezvous
from isotrain.adapters.horovod.private_api import ADDRESS_BYTES, NO_ADDRESS, RendezvousServer
from isotrain.adapters.horovod.rendezvous import InterruptibleRelay
from isotrain.core.contracts.process import ProcessContext, ProcessInfo
from isotrain.plugin import PeerLostError

LOOPBACK = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    """The server of rank 0."""
    server = RendezvousServer(LOOPBACK, 0)
    yield server
    server.stop()


@pytest.fixture
def relay(server: RendezvousServer) -> Iterator[InterruptibleRelay]:
    relay = InterruptibleRelay(LOOPBACK, server.server_port)
    yield relay
    relay.stop()


def request(
    relay: RendezvousServer, method: str, path: str, body: bytes = b""
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, relay.server_port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body=body)
        response = connection.getresponse()
        return response.status, response.read()


def address_of(listener: socket.socket) -> bytes:
    """The address of a listening socket, as Gloo tells it."""
    host, port = listener.getsockname()
    packed = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    return packed.ljust(ADDRESS_BYTES, b"\0")


def test_a_relay_has_the_values_of_the_server(
    server: RendezvousServer, relay: InterruptibleRelay
) -> None:
    assert request(relay, "GET", "/global/0") == (404, b"")
    assert request(server, "PUT", "/global/0", b"of another process")[0] == 200
    assert request(relay, "GET", "/global/0") == (200, b"of another process")
    assert request(relay, "PUT", "/global/1", b"of this one")[0] == 200
    assert request(server, "GET", "/global/1") == (200, b"of this one")
    assert request(relay, "DELETE", "/global/1")[0] == 200


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupted_relay_ends_each_wait(relay: InterruptibleRelay, is_late: bool) -> None:
    listeners = [socket.create_server((LOOPBACK, 0)) for _ in range(2)]
    if is_late:
        relay.interrupt()
    request(relay, "PUT", "/global/1", b"".join(map(address_of, listeners)))
    relay.interrupt()
    for listener in listeners:
        with listener, listener.accept()[0] as connection:
            assert connection.recv(1) == b"", "who has connected hangs up"
    assert request(relay, "GET", "/global/0") == (200, NO_ADDRESS)


def test_a_relay_without_its_server_gives_no_addresses() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    relay = InterruptibleRelay(LOOPBACK, port)
    with socket.create_server((LOOPBACK, 0)) as listener:
        assert request(relay, "PUT", "/global/1", address_of(listener))[0] == 200
        listener.settimeout(30)
        with listener.accept()[0] as connection:
            assert connection.recv(1) == b"", "nobody would find this process: it does not wait"
    assert request(relay, "GET", "/global/0") == (200, NO_ADDRESS)
    relay.stop()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_wait_for_others_is_interrupted(rank: int) -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    processes = tuple(ProcessInfo(each, local_rank=each, replicas=(each,)) for each in range(2))
    addresses = ((LOOPBACK, port), (LOOPBACK, 1))
    context = ProcessContext(rank, 2, "", processes, addresses, join_seconds=600.0)
    rendezvous.interrupt()
    try:
        with (
            pytest.raises(PeerLostError, match="is lost"),
            rendezvous.rendezvous(context, timeout=600.0),
        ):
            pytest.fail("a process did not come")
    finally:
        rendezvous.allow_waiting()


START = """
import horovod.torch as hvd
try:
    hvd.init()
except ValueError as error:
    print(error)
"""


def test_a_process_outlives_a_connection_that_was_reset_before_it_was_accepted(
    server: RendezvousServer,
) -> None:
    """Rank 1 of 2 is stopped while rank 0, which is this test, connects and is lost."""
    settings = {
        "RANK": 1,
        "SIZE": 2,
        "LOCAL_RANK": 1,
        "LOCAL_SIZE": 2,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
    }
    settings |= {"GLOO_RENDEZVOUS_ADDR": LOOPBACK, "GLOO_RENDEZVOUS_PORT": server.server_port}
    settings |= {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": "lo",
        "HOSTNAME": LOOPBACK,
    }
    environment = os.environ | {f"HOROVOD_{name}": str(value) for name, value in settings.items()}
    request(server, "PUT", "/global/rank_0", b"another host")
    with (
        socket.create_server(
            ("127.255.255.254", 0)
        ) as listener,  # the side with the lower address waits
        subprocess.Popen(
            [sys.executable, "-c", START], env=environment, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        while not (address := request(server, "GET", "/global/1")[1]):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        host, port = socket.inet_ntoa(address[4:8]), int.from_bytes(address[2:4], "big")
        with socket.create_connection((host, port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request(server, "PUT", "/global/0", address_of(listener))
        process.send_signal(signal.SIGCONT)
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "Horovod initialization failed" in printed
