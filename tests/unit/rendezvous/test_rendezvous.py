"""Rendezvous: which processes are accepted, what they agree on, and which errors they raise."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.planning.test_once_per_run import SPEC
from unit.rendezvous.rendezvous_helpers import LOCAL, LONG, free_port, key, meet, opened, settling

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.errors import IsotrainError, PeerLostError, PlanError, UnsupportedError
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.rendezvous import rendezvous as rendezvous_module
from isotrain.core.rendezvous import worker_group
from isotrain.core.rendezvous.consistency import (
    Facts,
    checkpoint_token,
    marker_file,
    require_equal,
)
from isotrain.core.rendezvous.rendezvous import Rendezvous, RendezvousClient, RendezvousHost
from isotrain.core.spec.loading import load_spec
from isotrain.core.transport import auth
from isotrain.core.transport import rank_zero_server as server_module
from isotrain.core.transport.connection import Connection
from isotrain.core.transport.rank_zero_server import RankZeroServer, connect_to_rank_zero


def test_all_ranks_get_what_rank_0_decides_from_all_facts() -> None:
    found = meet(dict.fromkeys(range(4), settling()), 4)
    assert [found[rank] for rank in range(4)] == [{"ranks": [0, 1, 2, 3]}] * 4


def test_all_ranks_raise_the_error_of_rank_0() -> None:
    def refuse(told: Sequence[Facts]) -> dict[str, Any]:
        raise PlanError(f"{len(told)} are too many")

    for error in meet(dict.fromkeys(range(3), settling(refuse)), 3).values():
        assert isinstance(error, PlanError)
        assert str(error) == "3 are too many"


def test_a_rank_that_fails_early_is_named_by_all_with_its_host() -> None:
    def broken(rendezvous: Rendezvous) -> Any:
        rendezvous.agree({"host": "n2"}, dict)
        with rendezvous.broadcasting_errors():
            raise UnsupportedError("there is no such thing here")

    def twice(rendezvous: Rendezvous) -> Any:
        with rendezvous.broadcasting_errors():
            rendezvous.agree({"host": "n"}, lambda told: {})
            return rendezvous.agree({}, lambda told: {})

    found = meet({0: twice, 1: twice, 2: broken}, 3)
    for rank in (0, 1):
        assert isinstance(found[rank], UnsupportedError)
        assert str(found[rank]) == "rank 2 on n2: there is no such thing here"


@pytest.mark.slow
def test_a_rank_that_leaves_early_is_named() -> None:
    def leave(rendezvous: Rendezvous) -> Any:
        assert isinstance(rendezvous, RendezvousClient)
        rendezvous.channel.close()

    found = meet({0: settling(), 1: leave, 2: settling()}, 3)
    for rank in (0, 2):
        assert "rank 1 left before the run began" in str(found[rank])


def test_a_missing_rank_is_named_after_the_start_timeout() -> None:
    has_come = threading.Event()

    def come(rendezvous: Rendezvous) -> Any:
        assert isinstance(rendezvous, RendezvousClient)
        rendezvous.channel.send({"facts": {"host": "n1"}})
        has_come.set()
        return settling()(rendezvous)

    def wait_for_the_others(rendezvous: Rendezvous) -> Any:
        assert has_come.wait(LONG)
        rendezvous.timeout = 0.5
        return settling()(rendezvous)

    found = meet({0: wait_for_the_others, 1: come}, 4)
    for error in found.values():
        assert isinstance(error, PeerLostError)
        assert str(error).startswith("rank 2, 3 of 4 never came to port ")
        assert "in 0.5 s (timeouts.start)" in str(error)


def test_without_rank_0_the_others_say_where_they_connected() -> None:
    text = str(meet({1: settling()}, 2, seconds=0.5)[1])
    assert text.startswith("rank 1 did not find rank 0 at 127.0.0.1, ports ")
    assert "connection refused" in text


WAY_OUT = r"Rank 0 of \d is what RANK say \(torchrun\)\. .* ISOTRAIN_ENVIRONMENT=none has it"


def test_a_waiting_rank_says_for_whom_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (rendezvous_module, server_module):
        monkeypatch.setattr(module, "LONG_WAIT_SECONDS", 0.0)
    found = meet({0: settling(), 1: settling()}, 3, seconds=1.0)
    (said,) = caplog.messages
    waits = r"waiting for up to 1 s \(timeouts.start\) for rank (1, )?2 at port \d+ of "
    assert re.match(waits + r"127\.0\.0\.1\. " + WAY_OUT, said)
    assert re.search(WAY_OUT, str(found[0]))


def test_replicas_that_are_not_those_of_the_processes_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the shell of `srun -n4 --pty`, no other process would come."""
    monkeypatch.setenv("ISOTRAIN_KEY", "of this test alone")
    monkeypatch.setattr(rendezvous_module, "LATE_SECONDS", 0.1)
    monkeypatch.setattr(worker_group, "REFUSED_SECONDS", 0.1)
    spec = load_spec(SPEC)
    for rank in (0, 1):
        there = ClusterInfo("torchrun", ("RANK",), rank, 4, "job", local_world_size=4)
        refused = "replicas: 2 were requested, and torchrun has started 4 .*" + WAY_OUT.replace(
            "0", str(rank), 1
        )
        with pytest.raises(PlanError, match=refused):
            worker_group.join_worker_group(
                there, lambda: (spec, plugin_manager()), backend="torch-ddp", replicas=2, port=None
            )


@pytest.mark.parametrize("asked", [True, False])
def test_clients_connect_to_the_requested_port_or_that_of_the_coordinator(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is that of `--port`, `ISOTRAIN_COORDINATOR` or the launcher."""
    monkeypatch.setenv("ISOTRAIN_KEY", "of this test alone")
    spec: Any = SimpleNamespace(timeouts=SimpleNamespace(start=0.0))
    with free_port() as told, free_port() as given:
        there = ClusterInfo("torchrun", ("RANK",), 1, 2, "job", hosts=("n0",), port=told)
        port = given if asked else None
        with pytest.raises(PeerLostError, match=f"ports {given if asked else told}, in 0 s"):
            worker_group.join_worker_group(
                there,
                lambda: (spec, plugin_manager()),
                backend="reference",
                replicas=None,
                port=port,
            )


def test_a_client_with_another_key_is_rejected_and_both_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "LAST_SECONDS", LONG)
    with (
        free_port() as port,
        contextlib.closing(RankZeroServer(LOCAL, [port], key().secret)) as server,
    ):
        with pytest.raises(PeerLostError, match="the server there rejected this process"):
            connect_to_rank_zero(LOCAL, [port], key(own=b"other").secret, 1, seconds=0.0)
        assert server.rejected_clients
        assert not server.arrivals()


@pytest.mark.slow
def test_a_server_that_trickles_bytes_cannot_hold_a_client() -> None:
    said: list[int] = []

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            for number in range(auth.CHALLENGE_BYTES):
                connection.sendall(b"x")
                said.append(number)
                time.sleep(0.5)

    with socket.create_server((LOCAL, 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(trickle, listener)
        with pytest.raises(PeerLostError, match="rejected this process, or was too slow"):
            connect_to_rank_zero(LOCAL, [listener.getsockname()[1]], key().secret, 1, seconds=0.0)
    assert len(said) < auth.CHALLENGE_BYTES


def test_foreign_connections_do_not_disturb() -> None:
    """Whatever they send, or nothing, is read as a handshake and as nothing else."""
    bombs = [b"GET / HTTP/1.1\r\n\r\n", pickle.dumps(print), b"", bytes(4096), b"isotrain"]

    def call(port: int) -> None:
        for bomb in bombs:
            with (
                socket.create_connection((LOCAL, port)) as connection,
                contextlib.suppress(OSError),
            ):
                connection.sendall(bomb)

    own = key()
    with free_port() as port:
        rank_0 = opened(0, 2, own, port, LONG)
        call(port)
        client = opened(1, 2, own, port, LONG)
        with both(rank_0, lambda: client):
            call(port)
            assert settling()(rank_0) == {"ranks": [0, 1]}


@pytest.mark.slow
def test_duplicate_ranks_are_an_error_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = key()
    arrived: list[Any] = []

    def all_at_once(server: RankZeroServer) -> list[Any]:
        """The three clients, once all of them are there."""
        arrived.extend(arrivals(server))
        return [arrived.pop(0) for _ in range(3)] if len(arrived) == 3 else []

    arrivals = RankZeroServer.arrivals
    monkeypatch.setattr(RankZeroServer, "arrivals", all_at_once)
    with free_port() as port:
        rank_0 = opened(0, 3, own, port, LONG)
        first, second, other = (opened(rank, 3, own, port, LONG) for rank in (1, 1, 2))
        with pytest.raises(IsotrainError, match="two processes say that they are rank 1"):
            settling()(rank_0)
        rank_0.close()
        for client in (first, other):
            with contextlib.closing(client), pytest.raises(IsotrainError, match="are rank 1"):
                settling()(client)
        second.close()


def test_a_failed_rendezvous_ends_when_rank_0_closes() -> None:
    """The others wait for rank 0 to close, which it otherwise does at the end of its program."""
    own = key()
    with free_port() as port:
        rank_0 = opened(0, 2, own, port, LONG)
        client = opened(1, 2, own, port, LONG)
        assert isinstance(client, RendezvousClient)
        client.channel.send({"facts": {}})
        with pytest.raises(PlanError, match="no"):
            settling(refusing)(rank_0)
        assert client.channel.wait(LONG) is not None
        assert not client.channel.has_gone(0.0)
        RendezvousHost.close_previous()
        assert client.channel.has_gone(LONG)
        client.close()


def refusing(told: Sequence[Facts]) -> dict[str, Any]:
    raise PlanError("no")


def test_a_client_that_reconnects_is_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous_module, "RECONNECT_SECONDS", LONG)
    own = key()
    with free_port() as port:
        rank_0 = opened(0, 2, own, port, LONG)
        connect_to_rank_zero(LOCAL, [port], own.secret, 1, LONG).close()  # it had hung up by then
        with both(rank_0, lambda: opened(1, 2, own, port, LONG)):
            assert settling()(rank_0) == {"ranks": [0, 1]}


@contextlib.contextmanager
def both(rank_0: Rendezvous, come: Callable[[], Rendezvous]) -> Iterator[None]:
    """Within it, the other one comes and settles too, a little later; both end at once."""

    def part() -> None:
        time.sleep(0.2)
        with contextlib.closing(come()) as client:
            settling()(client)

    with contextlib.closing(rank_0):
        thread = threading.Thread(target=part)
        thread.start()
        yield
    thread.join()


def test_differences_are_named_with_their_rank() -> None:
    def compare(rendezvous: Rendezvous) -> None:
        rate = 0.5 if rendezvous.cluster_info.rank == 2 else 0.25
        parts = {"spec": {"optimizer": {"lr": rate}, "data": [1, 2]}, "versions": {"numpy": "2"}}
        with rendezvous.broadcasting_errors():
            require_equal(rendezvous, parts)

    for error in meet(dict.fromkeys(range(3), compare), 3).values():
        assert isinstance(error, PlanError)
        assert "\n  rank 2: spec.optimizer.lr is 0.5, on rank 0 0.25\n" in str(error)
        assert "rank 1:" not in str(error)


def test_only_the_same_folder_has_the_marker_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with marker_file(tmp_path / "one") as mark:
        assert Path(mark).parent == tmp_path / "one"
        assert Path(mark).is_file()
        assert not (tmp_path / "two" / Path(mark).name).exists()
    assert not [*(tmp_path / "one").iterdir()]
    assert checkpoint_token(str(tmp_path / "one")) is None
    assert checkpoint_token("s3://bucket/run") is not None


def test_messages_are_read_in_pieces_and_limited_in_size() -> None:
    one, other = connected()
    with one, other:
        read_them(one, other)


def read_them(one: socket.socket, other: socket.socket) -> None:
    inbox = Connection(one).reader()
    array = np.arange(6.0).reshape(2, 3)
    sender = Connection(other)
    assert inbox.read() == []
    sender.send({"a": 1}, [array])
    sender.send({"b": None})
    (first, arrays), (second, none) = whole(inbox, 2)
    assert (first, second, none) == ({"a": 1}, {"b": None}, [])
    np.testing.assert_array_equal(arrays[0], array)
    other.sendall((1 << 28).to_bytes(8, "big") + json.dumps({}).encode())
    with pytest.raises(ValueError, match="received a length"):
        whole(inbox, 1)


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((LOCAL, 0)) as server:
        calling = socket.create_connection(server.getsockname())
        return server.accept()[0], calling


def whole(inbox: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += inbox.read()
    return found
