"""Encrypted connections between the processes of a run: what is sent, and which clients are accepted."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.certificates import SERVER, Authority
from helpers.waiting import wait_until
from unit.rendezvous.rendezvous_helpers import LOCAL, LONG, free_port, key, meet, settling

from isotrain.core.errors import IsotrainError, PeerLostError, PlanError
from isotrain.core.transport import auth, tls
from isotrain.core.transport import rank_zero_server as server_module
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.connection import authenticate
from isotrain.core.transport.encryption import EncryptionOffer
from isotrain.core.transport.rank_zero_server import RankZeroServer, connect_to_rank_zero
from isotrain.core.transport.tls import TlsEndpoint

SECRET = b"nobody is to read this"
AUTHORITY = Authority()


@pytest.fixture(autouse=True)
def calls_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is made where there is no time for a second one, too."""
    monkeypatch.setattr(server_module, "LAST_SECONDS", LONG)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[EncryptionOffer]:
    """EncryptionOffer of two hosts with certificates of one authority."""
    made = tmp_path_factory.mktemp("hosts")
    return [EncryptionOffer.from_folder(AUTHORITY.folder(made / name)) for name in "ab"]


class Between:
    """Passes on what two ends say to each other, and keeps it."""

    def __init__(
        self, port: int, pauses: tuple[float, float] = (0.0, 0.0), piece: int = 1 << 16
    ) -> None:
        """Stands between.

        Args:
            port: Port of the server.
            pauses: Seconds between pieces of the client's and of the server's bytes.
            piece: Bytes that it passes on at once.
        """
        self._pauses = pauses
        self._piece = piece
        self._listener = socket.create_server((LOCAL, 0))
        self._towards = port
        self.port = self._listener.getsockname()[1]
        self.heard = [bytearray(), bytearray()]
        """Bytes of the client and of the server."""
        self.most = 1 << 40
        """Bytes of an end after which it is killed."""
        self.ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        calling, _ = self._listener.accept()
        called = socket.create_connection((LOCAL, self._towards))
        self.ends = [calling, called]
        for number in (0, 1):
            ends = self.ends[number], self.ends[1 - number]
            thread = threading.Thread(target=self._pass_on, args=(number, *ends))
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, number: int, one: socket.socket, other: socket.socket) -> None:
        heard = self.heard[number]
        with contextlib.suppress(OSError):
            while len(heard) < self.most and (part := one.recv(self._piece)):
                heard += part
                other.sendall(part)
                time.sleep(self._pauses[number])
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hangs up on both."""
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (*self.ends, self._listener):
            end.close()


@contextlib.contextmanager
def line(
    client_offer: EncryptionOffer, server_offer: EncryptionOffer
) -> Iterator[tuple[Channel, Channel, Between]]:
    """Both ends of a connection that has been made, and who listens in between."""
    secret = key().secret
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(free_port())
        server = stack.enter_context(
            contextlib.closing(RankZeroServer(LOCAL, [port], secret, server_offer))
        )
        between = stack.enter_context(contextlib.closing(Between(port)))
        calling = stack.enter_context(
            contextlib.closing(
                connect_to_rank_zero(LOCAL, [between.port], secret, 1, LONG, client_offer)
            )
        )
        ((rank, connection),) = wait_until(server.arrivals, LONG)
        assert rank == 1
        yield (
            Channel(calling),
            stack.enter_context(contextlib.closing(Channel(connection))),
            between,
        )


def taken(channel: Channel, count: int) -> list[Any]:
    found = []
    while len(found) < count:
        message = channel.wait(LONG)
        assert message is not None, f"{len(found)} of {count} came"
        found.append(message)
    return found


def test_encrypted_messages_go_both_ways_at_once_and_cannot_be_read(
    hosts: list[EncryptionOffer],
) -> None:
    """They are more than all buffers hold, of several threads; neither end may wait for the other to read."""
    array = np.arange(1 << 21, dtype=np.float64)  # 16 MiB, a thousand records
    many = 500

    def tell(channel: Channel) -> None:
        channel.send({"secret": SECRET.decode()}, [array, np.zeros((0, 3)), array[:3]])

    def chatter(channel: Channel) -> None:
        for number in range(many):
            channel.send({"number": number})

    with line(*hosts) as (one, other, between), ThreadPoolExecutor(4) as pool:
        said = [pool.submit(what, each) for what in (tell, chatter) for each in (one, other)]
        for channel in (one, other):
            found = taken(channel, many + 1)
            (long,) = (each for each in found if "secret" in each[0])
            assert long[0] == {"secret": SECRET.decode()}
            for received, sent in zip(long[1], [array, np.zeros((0, 3)), array[:3]], strict=True):
                np.testing.assert_array_equal(received, sent)
            assert [h["number"] for h, _ in found if "number" in h] == list(range(many))
            assert channel.read() == []
        for each in said:
            each.result()
        heard = bytes(between.heard[0] + between.heard[1])
    assert len(heard) > 2 * array.nbytes
    assert SECRET not in heard
    assert array[1000:1002].tobytes() not in heard


def test_unencrypted_messages_can_be_read(hosts: list[EncryptionOffer]) -> None:
    """So the test before can fail."""
    with line(EncryptionOffer(), EncryptionOffer()) as (one, other, between):
        one.send({"secret": SECRET.decode()})
        taken(other, 1)
        assert SECRET in between.heard[0]


def test_a_peer_killed_during_a_message_is_gone(hosts: list[EncryptionOffer]) -> None:
    with line(*hosts) as (one, other, between), ThreadPoolExecutor(1) as pool:
        one.send({"number": 0})
        assert taken(other, 1) == [({"number": 0}, [])]
        between.most = 1 << 20
        long = pool.submit(one.send, {"number": 1}, [np.zeros(1 << 22)])
        assert other.wait(LONG) is None
        assert other.received > 1 << 19
        between.close()
        long.result()
        one.send({"number": 2})  # goes nowhere
        assert one.wait(LONG) is None


def test_the_last_message_is_read_before_the_end(hosts: list[EncryptionOffer]) -> None:
    with line(*hosts) as (one, other, _):
        for number in range(3):
            one.send({"number": number})
        one.shutdown_write()
        other.send({"heard": True})
        assert [header["number"] for header, _ in taken(other, 3)] == [0, 1, 2]
        assert other.wait(LONG) is None
        assert taken(one, 1) == [({"heard": True}, [])]


def test_modified_messages_end_the_connection(hosts: list[EncryptionOffer]) -> None:
    with line(*hosts) as (one, other, between):
        one.send({"number": 0})
        taken(other, 1)
        between.ends[1].sendall(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record by somebody else
        assert other.wait(LONG) is None


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_message_sent_with_the_handshake_is_read(
    newest: ssl.TLSVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Limited(ssl.SSLContext):
        def __init__(self, protocol: int) -> None:
            self.maximum_version = newest
            made.append(self)

    monkeypatch.setattr(tls, "ssl", SimpleNamespace(**{**vars(ssl), "SSLContext": Limited}))
    hosts = [EncryptionOffer.from_folder(AUTHORITY.folder(tmp_path / name)) for name in "ab"]
    secret = key().secret

    def greet(server: RankZeroServer) -> Channel:
        ((_, connection),) = wait_until(server.arrivals, LONG)
        channel = Channel(connection)
        channel.send({"at": "once"})
        return channel

    assert {context.maximum_version for context in made} == {newest}
    with (
        free_port() as port,
        contextlib.closing(RankZeroServer(LOCAL, [port], secret, hosts[0])) as server,
        contextlib.closing(Between(port, pauses=(0.0, 0.1))) as between,
        ThreadPoolExecutor(1) as pool,
    ):
        greeting = pool.submit(greet, server)
        with contextlib.closing(
            connect_to_rank_zero(LOCAL, [between.port], secret, 1, LONG, hosts[1])
        ) as connection:
            assert taken(Channel(connection), 1) == [({"at": "once"}, [])]
        greeting.result().close()


def test_a_client_without_a_certificate_is_rejected(hosts: list[EncryptionOffer]) -> None:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    end = TlsEndpoint(anybody, b"", is_client=True)
    with (
        free_port() as port,
        contextlib.closing(RankZeroServer(LOCAL, [port], key().secret, hosts[0])) as server,
    ):
        with socket.create_connection((LOCAL, port), LONG) as calling:
            assert authenticate(calling, key().secret, 1, hosts[1])
            calling.sendall(end.do_handshake(b""))
            while not end.is_ready:
                calling.sendall(end.do_handshake(heard(calling)))
            with pytest.raises(OSError, match="certificate"):
                end.decrypted(heard(calling))
        wait_until(lambda: server.rejected, LONG)
        assert "peer did not return a certificate" in server.rejected[1]
        assert not server.arrivals()


def test_a_rejected_client_gets_the_reason_while_it_still_sends(
    hosts: list[EncryptionOffer], tmp_path: Path
) -> None:
    """The client trusts rank 0, and rank 0 not the client, whose bytes may not lose rank 0's last message."""
    foreign = Path(Authority().folder(tmp_path / "foreign"))
    with (foreign / "ca.crt").open("ab") as known:
        known.write((Path(hosts[0].folder) / "ca.crt").read_bytes())
    with (
        free_port() as port,
        contextlib.closing(RankZeroServer(LOCAL, [port], key().secret, hosts[0])) as server,
        contextlib.closing(Between(port, pauses=(0.02, 0.0), piece=400)) as between,
    ):
        with pytest.raises(PlanError, match="the other end gave up: tlsv1 alert"):
            connect_to_rank_zero(
                LOCAL,
                [between.port],
                key().secret,
                1,
                0.0,
                EncryptionOffer.from_folder(str(foreign)),
            )
        between.close()
        wait_until(lambda: server.rejected, LONG)
        assert "the certificate is not accepted" in server.rejected[1]


def test_a_man_in_the_middle_with_a_valid_certificate_is_noticed(
    hosts: list[EncryptionOffer], tmp_path: Path
) -> None:
    """It forwards the proofs of the key, and encrypts by itself with both ends."""
    own = EncryptionOffer.from_folder(AUTHORITY.folder(tmp_path / "thief")).tls
    assert own is not None
    secret = key().secret

    def intrude(port: int, listener: socket.socket) -> None:
        calling, _ = listener.accept()
        called = socket.create_connection((LOCAL, port))
        with calling, called:
            calling.sendall(exactly(called, auth.CHALLENGE_BYTES))
            called.sendall(exactly(calling, auth.ANSWER_BYTES))
            calling.sendall(exactly(called, auth.CONFIRMATION_BYTES))
            to_server, to_client = (
                own.new_endpoint(is_client=True),
                own.new_endpoint(is_client=False),
            )
            said = b""
            while not to_server.is_ready:
                called.sendall(to_server.do_handshake(said))
                said = b"" if to_server.is_ready else heard(called)
            while not to_client.is_ready:
                calling.sendall(to_client.do_handshake(heard(calling)))
            plain = b""
            while not plain:
                plain = to_server.decrypted(heard(called))
            calling.sendall(b"".join(to_client.encrypted(plain)))
            calling.recv(1)

    with (
        free_port() as port,
        contextlib.closing(RankZeroServer(LOCAL, [port], secret, hosts[0])),
        socket.create_server((LOCAL, 0)) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        intruder = pool.submit(intrude, port, listener)
        with pytest.raises(PeerLostError, match="a third party between this process and the"):
            connect_to_rank_zero(LOCAL, [listener.getsockname()[1]], secret, 1, 0.0, hosts[1])
        intruder.result()


def exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += heard(connection, count - len(found))
    return found


def heard(connection: socket.socket, most: int = 1 << 16) -> bytes:
    """What comes next; whoever hangs up ends the test."""
    connection.settimeout(LONG)
    found = connection.recv(most)
    if not found:
        raise EOFError("the other end has hung up")
    return found


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """What ranks have been told, by what is the matter with it."""
    own = AUTHORITY.folder(tmp_path / "good")
    return {
        "none": "",
        "good": own,
        "good too": AUTHORITY.folder(tmp_path / "too"),
        "foreign": Authority().folder(tmp_path / "foreign"),
        "expired": AUTHORITY.folder(tmp_path / "expired", days=-1),
        "missing": str(tmp_path / "missing"),
    }


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            ("good", "none", "good too"),
            "rank 0 encrypts (ISOTRAIN_TLS={0}), and rank 1 does not encrypt (ISOTRAIN_TLS is not set"
            " there).",
        ),
        (
            ("none", "good", "none"),
            "rank 0 does not encrypt (ISOTRAIN_TLS is not set there), and rank 1 encrypts"
            " (ISOTRAIN_TLS={1}).",
        ),
        (
            ("good", "missing", "good"),
            "rank 1 cannot encrypt: ISOTRAIN_TLS: {1}/ca.crt cannot be read: No such file or directory.",
        ),
        (
            ("none", "expired", "none"),
            "rank 1 cannot encrypt: ISOTRAIN_TLS: {1}/tls.crt: the certificate is not accepted: certificate"
            " has expired.",
        ),
        (
            ("missing", "good", "none"),
            "rank 0 cannot encrypt: ISOTRAIN_TLS: {0}/ca.crt cannot be read",
        ),
        (
            ("good", "foreign", "good"),
            " Both have ISOTRAIN_TLS set. Give all hosts the same ca.crt",
        ),
    ],
)
def test_all_ranks_name_the_mismatch_and_the_remedy(
    told: tuple[str, ...], expected: str, folders: Mapping[str, str]
) -> None:
    given = {rank: folders[what] for rank, what in enumerate(told)}
    found = meet(dict.fromkeys(range(3), settling()), 3, folders=given)
    text = expected.format(*(folders[what] for what in told))
    for rank in range(3):
        assert isinstance(found[rank], PlanError), found[rank]
        assert text in str(found[rank]), rank


def test_encrypting_ranks_rendezvous(folders: Mapping[str, str]) -> None:
    given = {rank: folders["good too" if rank % 2 else "good"] for rank in range(4)}
    found = meet(dict.fromkeys(range(4), settling()), 4, folders=given)
    assert [found[rank] for rank in range(4)] == [{"ranks": [0, 1, 2, 3]}] * 4


def test_a_too_long_reason_is_shortened() -> None:
    told = EncryptionOffer.from_bytes(EncryptionOffer(problem="why " + "ö" * 400).to_bytes())
    assert told.problem.startswith("why öö")
    assert told.problem.endswith("ö...")
    assert EncryptionOffer.from_bytes(EncryptionOffer(problem="why").to_bytes()).problem == "why"


def test_a_rank_that_cannot_encrypt_says_so_without_rank_0(folders: Mapping[str, str]) -> None:
    found = meet({1: settling()}, 2, seconds=0.1, folders={1: folders["missing"]})
    assert "cannot be read: No such file or directory" in str(found[1])


def test_a_client_with_another_key_learns_nothing_of_certificates(
    hosts: list[EncryptionOffer],
) -> None:
    with (
        free_port() as port,
        contextlib.closing(RankZeroServer(LOCAL, [port], key().secret, hosts[0])) as server,
    ):
        with pytest.raises(PeerLostError, match="rejected this process"):
            connect_to_rank_zero(LOCAL, [port], b"another", 1, 0.0, hosts[1])
        assert not server.rejected
        assert server.rejected_clients


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("no key", "tls.key cannot be read: No such file"),
        ("folder", "ca.crt cannot be read: Is a directory"),
        ("open key", "tls.key is a private key, and other users can read it: chmod o= "),
        ("password", "the key has a password"),
        ("other key", "key values mismatch. Expected PEM files"),
        ("no PEM", "no certificate or crl found. Expected PEM files"),
        (
            "server",
            "unsuitable certificate purpose. It has to be signed by ca.crt beside it, for servers",
        ),
        ("expired", "certificate has expired"),
        ("other ca", "the certificate is not accepted: "),
    ],
)
def test_unusable_certificate_files_are_named(damage: str, expected: str, tmp_path: Path) -> None:
    made = tmp_path / "tls"
    options: dict[str, Any] = {
        "password": {"password": b"hidden"},
        "server": {"use": SERVER},
        "expired": {"days": -1},
    }
    AUTHORITY.folder(made, **options.get(damage, {}))
    other = Path(Authority().folder(tmp_path / "other"))
    if damage == "no key":
        (made / "tls.key").unlink()
    elif damage == "folder":
        (made / "ca.crt").unlink()
        (made / "ca.crt").mkdir()
    elif damage == "open key":
        (made / "tls.key").chmod(0o644)
    elif damage == "other key":
        shutil.copy(other / "tls.key", made)
    elif damage == "other ca":
        shutil.copy(other / "ca.crt", made)
    elif damage == "no PEM":
        (made / "ca.crt").write_text("nothing")
    offer = EncryptionOffer.from_folder(str(made))
    assert offer.tls is None
    assert expected in offer.problem
    with pytest.raises(IsotrainError, match="ISOTRAIN_TLS: "):
        offer.require_available()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_documented_openssl_commands_make_usable_certificates(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "launching" / "tls.md").read_text(encoding="utf-8")
    (making,) = re.findall(r"^```sh\n(.*?)^export ISOTRAIN_TLS", page, re.MULTILINE | re.DOTALL)
    subprocess.run(["sh", "-ec", making], cwd=tmp_path, check=True, capture_output=True)
    assert EncryptionOffer.from_folder(str(tmp_path / "tls")).problem == ""
