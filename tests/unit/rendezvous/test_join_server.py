"""The server for processes that join goes on after clients that do not ask as they should."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.waiting import wait_until
from unit.rendezvous.rendezvous_helpers import LOCAL, LONG, PLAIN, free_port

from isotrain.core.rendezvous.join_server import JoinAddress, JoinServer
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.rank_zero_server import connect_to_rank_zero

REQUEST = {"host": "node3", "address": "10.0.0.3", "port": 20000}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[JoinServer]:
    with (
        free_port() as port,
        contextlib.closing(JoinServer(tmp_path, (LOCAL, port), 2, PLAIN, {"replicas": 2})) as made,
    ):
        yield made


def described(server: JoinServer, folder: Path) -> Channel:
    """The end of a process with the key, once it has the description of the run."""
    found = JoinAddress.read(folder)
    channel = Channel(connect_to_rank_zero(found.host, [found.port], found.key, found.rank, LONG))
    messages = wait_until(lambda: server.accept() or channel.read(), LONG)
    assert [message for message, _ in messages] == [{"run": {"replicas": 2}}]
    return channel


@pytest.mark.parametrize("messages", [[{"other": 1}], [{"join": {}}], [{"join": None}], []])
def test_a_client_that_asks_otherwise_is_dropped(
    server: JoinServer, tmp_path: Path, messages: list[Mapping[str, Any]]
) -> None:
    with contextlib.closing(described(server, tmp_path)) as client:
        for message in messages:
            client.send(message)
        if not messages:
            client.shutdown()
        wait_until(lambda: server.accept() == [] and client.read() is None, LONG)
    with contextlib.closing(described(server, tmp_path)) as client:
        client.send({"join": REQUEST})
        (request,) = wait_until(server.accept, LONG)
        assert (request.host, request.address) == ("node3", ("10.0.0.3", 20000))
        request.answer({"starts": 2})
        answer = client.wait(LONG)
        assert answer is not None
        assert answer[0]["answer"] == {"starts": 2}
        request.close()
