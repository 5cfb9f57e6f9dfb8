"""How the processes of a joined run meet: who is let in, what they agree on, and what they are told."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import socket
import tempfile
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
from isotrain.core.launching.processes.ports import PORTS, Ports
from isotrain.core.planning.cluster_resources import replicas_for
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.rendezvous import interfaces, rendezvous_address, worker_group
from isotrain.core.rendezvous import rendezvous as meeting_module
from isotrain.core.rendezvous import shared_secret as key_module
from isotrain.core.rendezvous.consistency import (
    Facts,
    LocalRankAssignment,
    checkpoint_token,
    marker_file,
    require_equal,
)
from isotrain.core.rendezvous.port_leases import PortLeases
from isotrain.core.rendezvous.rendezvous import Rendezvous, RendezvousClient, RendezvousHost
from isotrain.core.rendezvous.rendezvous_address import RendezvousAddress
from isotrain.core.spec.loading import load_spec
from isotrain.core.system import files
from isotrain.core.transport import auth
from isotrain.core.transport import rank_zero_server as welcome_module
from isotrain.core.transport.connection import Connection
from isotrain.core.transport.rank_zero_server import RankZeroServer, connect_to_rank_zero


def test_all_get_what_rank_0_decides_of_what_all_have_told() -> None:
    found = meet(dict.fromkeys(range(4), settling()), 4)
    assert [found[rank] for rank in range(4)] == [{"ranks": [0, 1, 2, 3]}] * 4


def test_all_raise_what_rank_0_finds() -> None:
    def refuse(told: Sequence[Facts]) -> dict[str, Any]:
        raise PlanError(f"{len(told)} are too many")

    for error in meet(dict.fromkeys(range(3), settling(refuse)), 3).values():
        assert isinstance(error, PlanError)
        assert str(error) == "3 are too many"


def test_who_fails_before_the_run_is_named_by_all_with_its_host() -> None:
    def broken(meeting: Rendezvous) -> Any:
        meeting.agree({"host": "n2"}, dict)
        with meeting.broadcasting_errors():
            raise UnsupportedError("there is no such thing here")

    def twice(meeting: Rendezvous) -> Any:
        with meeting.broadcasting_errors():
            meeting.agree({"host": "n"}, lambda told: {})
            return meeting.agree({}, lambda told: {})

    found = meet({0: twice, 1: twice, 2: broken}, 3)
    for rank in (0, 1):
        assert isinstance(found[rank], UnsupportedError)
        assert str(found[rank]) == "rank 2 on n2: there is no such thing here"


@pytest.mark.slow
def test_who_leaves_before_the_run_is_named() -> None:
    def leave(meeting: Rendezvous) -> Any:
        assert isinstance(meeting, RendezvousClient)
        meeting.channel.close()

    found = meet({0: settling(), 1: leave, 2: settling()}, 3)
    for rank in (0, 2):
        assert "rank 1 left before the run began" in str(found[rank])


def test_who_never_comes_is_named_when_the_start_limit_is_over() -> None:
    has_come = threading.Event()

    def come(meeting: Rendezvous) -> Any:
        assert isinstance(meeting, RendezvousClient)
        meeting.channel.send({"facts": {"host": "n1"}})
        has_come.set()
        return settling()(meeting)

    def wait_for_the_others(meeting: Rendezvous) -> Any:
        assert has_come.wait(LONG)
        meeting.timeout = 0.5
        return settling()(meeting)

    found = meet({0: wait_for_the_others, 1: come}, 4)
    for error in found.values():
        assert isinstance(error, PeerLostError)
        assert str(error).startswith("rank 2, 3 of 4 never came to port ")
        assert "in 0.5 s (timeouts.start)" in str(error)


def test_without_rank_0_the_others_say_where_they_looked() -> None:
    text = str(meet({1: settling()}, 2, seconds=0.5)[1])
    assert text.startswith("rank 1 did not find rank 0 at 127.0.0.1, ports ")
    assert "connection refused" in text


WAY_OUT = r"Rank 0 of \d is what RANK say \(torchrun\)\. .* ISOTRAIN_ENVIRONMENT=none has it"


def test_who_waits_says_for_whom_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (meeting_module, welcome_module):
        monkeypatch.setattr(module, "LONG_WAIT_SECONDS", 0.0)
    found = meet({0: settling(), 1: settling()}, 3, seconds=1.0)
    said = capsys.readouterr().err
    waits = r"isotrain: waiting for up to 1 s \(timeouts.start\) for rank (1, )?2 at port \d+ of "
    assert re.match(waits + r"127\.0\.0\.1\. " + WAY_OUT, said)
    assert said.count("waiting") == 1, "no more than once"
    assert re.search(WAY_OUT, str(found[0]))


def test_replicas_that_are_not_those_of_the_processes_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the shell of `srun -n4 --pty`, where nobody else comes."""
    monkeypatch.setenv("ISOTRAIN_KEY", "of this test alone")
    monkeypatch.setattr(meeting_module, "LATE_SECONDS", 0.1)
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
def test_rank_0_is_looked_for_at_the_port_that_was_asked_for_or_else_told(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--port`, and the port of `ISOTRAIN_COORDINATOR` or the engine, which is part of the place."""
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


def test_who_has_another_key_stays_outside_and_both_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(welcome_module, "LAST_SECONDS", LONG)
    with (
        free_port() as port,
        contextlib.closing(RankZeroServer(LOCAL, [port], key().secret)) as welcome,
    ):
        with pytest.raises(PeerLostError, match="the server there rejected this process"):
            connect_to_rank_zero(LOCAL, [port], key(own=b"other").secret, 1, seconds=0.0)
        assert welcome.rejected_clients
        assert not welcome.arrivals()


def test_who_listens_there_cannot_hold_a_process_by_a_byte_at_a_time() -> None:
    said: list[int] = []

    def trickle(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        with caller, contextlib.suppress(OSError):
            for number in range(auth.CHALLENGE_BYTES):
                caller.sendall(b"x")
                said.append(number)
                time.sleep(0.1)

    with socket.create_server((LOCAL, 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(trickle, listener)
        with pytest.raises(PeerLostError, match="rejected this process, or was too slow"):
            connect_to_rank_zero(LOCAL, [listener.getsockname()[1]], key().secret, 1, seconds=0.0)
    assert 0 < len(said) < auth.CHALLENGE_BYTES


def test_strangers_at_the_door_do_not_disturb() -> None:
    """Whatever they say, and though they say nothing: it is read as a handshake, and as nothing else."""
    bombs = [b"GET / HTTP/1.1\r\n\r\n", pickle.dumps(print), b"", bytes(4096), b"isotrain"]

    def call(port: int) -> None:
        for bomb in bombs:
            with socket.create_connection((LOCAL, port)) as stranger, contextlib.suppress(OSError):
                stranger.sendall(bomb)

    own = key()
    with free_port() as port:
        chair = opened(0, 2, own, port, LONG)
        call(port)
        member = opened(1, 2, own, port, LONG)
        with both(chair, lambda: member):
            call(port)
            assert settling()(chair) == {"ranks": [0, 1]}


@pytest.mark.slow
def test_two_that_say_they_are_the_same_rank_are_refused_and_all_hear_of_it() -> None:
    own = key()
    with free_port() as port:
        chair = opened(0, 3, own, port, LONG)
        first, second, other = (opened(rank, 3, own, port, LONG) for rank in (1, 1, 2))
        time.sleep(0.1)  # so that they are there at the first look
        with pytest.raises(IsotrainError, match="two processes say that they are rank 1"):
            settling()(chair)
        chair.close()
        for member in (first, other):
            with contextlib.closing(member), pytest.raises(IsotrainError, match="are rank 1"):
                settling()(member)
        second.close()


def test_who_was_told_of_a_failure_goes_on_when_rank_0_does() -> None:
    """The others wait for rank 0 to hang up, which it does at the end of its program otherwise."""
    own = key()
    with free_port() as port:
        chair = opened(0, 2, own, port, LONG)
        member = opened(1, 2, own, port, LONG)
        assert isinstance(member, RendezvousClient)
        member.channel.send({"facts": {}})
        with pytest.raises(PlanError, match="no"):
            settling(refusing)(chair)
        assert member.channel.wait(LONG) is not None
        assert not member.channel.has_gone(0.0)
        RendezvousHost.close_previous()
        assert member.channel.has_gone(LONG)
        member.close()


def refusing(told: Sequence[Facts]) -> dict[str, Any]:
    raise PlanError("no")


def test_who_was_let_in_too_late_and_calls_again_is_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_module, "RECONNECT_SECONDS", LONG)
    own = key()
    with free_port() as port:
        chair = opened(0, 2, own, port, LONG)
        connect_to_rank_zero(LOCAL, [port], own.secret, 1, LONG).close()  # it had hung up by then
        with both(chair, lambda: opened(1, 2, own, port, LONG)):
            assert settling()(chair) == {"ranks": [0, 1]}


@contextlib.contextmanager
def both(chair: Rendezvous, come: Callable[[], Rendezvous]) -> Iterator[None]:
    """Within it, the other one comes and settles too, a little later; both end at once."""

    def part() -> None:
        time.sleep(0.2)
        with contextlib.closing(come()) as member:
            settling()(member)

    with contextlib.closing(chair):
        thread = threading.Thread(target=part)
        thread.start()
        yield
    thread.join()


def test_what_differs_is_named_with_its_rank() -> None:
    def compare(meeting: Rendezvous) -> None:
        rate = 0.5 if meeting.cluster_info.rank == 2 else 0.25
        parts = {"spec": {"optimizer": {"lr": rate}, "data": [1, 2]}, "versions": {"numpy": "2"}}
        with meeting.broadcasting_errors():
            require_equal(meeting, parts)

    for error in meet(dict.fromkeys(range(3), compare), 3).values():
        assert isinstance(error, PlanError)
        assert "\n  rank 2: spec.optimizer.lr is 0.5, on rank 0 0.25\n" in str(error)
        assert "rank 1:" not in str(error)


def test_keys_are_the_same_for_one_run_and_differ_between_runs() -> None:
    assert key().secret == key().secret
    others = [key("another"), key(number=1), key(own=b"mine")]
    assert len({each.secret for each in (key(), *others)}) == 4
    assert key().numbers(8, 1000) == key().numbers(8, 1000)
    assert len({*key().numbers(8, 10)}) == 8


@pytest.mark.parametrize(
    ("coordinator", "found", "listening"),
    [
        (
            "node1",
            "127.0.1.1",
            "",
        ),  # as Debian has a host's own name: the others get another address
        ("node1", LOCAL, ""),
        ("localhost", LOCAL, LOCAL),
        (LOCAL, LOCAL, LOCAL),
        ("node1", "203.0.113.7", ""),  # not this machine's: it is behind another
        ("node1", None, ""),
    ],
)
def test_rank_0_listens_where_the_others_call(
    coordinator: str, found: str | None, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str) -> str:
        if found is None:
            raise socket.gaierror("unknown")
        return found

    monkeypatch.setattr(rendezvous_address.socket, "gethostbyname", resolve)
    there = ClusterInfo("torchrun", ("RANK",), 0, 2, "job", coordinator=coordinator)
    for interface in ("", "lo"):  # which is for what comes after the door
        assert RendezvousAddress.of(there, interface) == RendezvousAddress(coordinator, listening)


@pytest.mark.parametrize("told", [{"hosts": ("n1",)}, {"local_world_size": 2}])
def test_on_one_host_all_use_the_same_address_whatever_it_is_called(told: dict[str, Any]) -> None:
    for interface, expected in (("", LOCAL), ("127.0.0.9", "127.0.0.9")):
        for rank in (0, 1):
            there = ClusterInfo("mpich", ("PMI_RANK",), rank, 2, "job", coordinator="n1", **told)
            assert RendezvousAddress.of(there, interface) == RendezvousAddress(expected, expected)


def test_an_interface_is_chosen_by_option_or_variable_and_has_to_be_there() -> None:
    variables = {"ISOTRAIN_INTERFACE": " eth7 "}
    assert interfaces.requested_interface(None, variables) == "eth7"
    assert interfaces.requested_interface("lo", variables) == "lo"
    assert interfaces.requested_interface(None, {}) == ""
    assert [interfaces.interface_address(each) for each in ("", "lo", "127.0.0.9")] == [
        *(None, LOCAL, "127.0.0.9")
    ]
    with pytest.raises(
        PlanError, match=r"interface \(or ISOTRAIN_INTERFACE\): .* 'no0'\. It has .*lo: "
    ):
        interfaces.interface_address("no0")


def test_who_does_not_know_where_rank_0_is_says_what_to_set() -> None:
    with pytest.raises(PlanError, match="Set ISOTRAIN_COORDINATOR"):
        RendezvousAddress.of(ClusterInfo("mpich", ("PMI_RANK",), 1, 2, "job"), "")


TOLD = range(PORTS.stop + 100, PORTS.stop + 700, 10)
"""Between the ports that runs take by themselves and those that systems hand out."""


def test_ports_after_one_that_was_asked_for_are_those_that_are_free() -> None:
    with contextlib.ExitStack() as stack:

        def kept(address: str) -> Ports:
            return stack.enter_context(contextlib.closing(Ports(address)))

        others = kept(LOCAL)
        first = next(p for p in TOLD if free(others, p + 1))
        one, another = PortLeases(kept), PortLeases(kept)  # of two processes of a host
        assert one.backend("tf", LOCAL, first) == first + 2
        assert one.backend("tf", LOCAL, first) == one.backend("tf", LOCAL, None) == first + 2
        assert another.backend("tf", LOCAL, first) == first + 3
        for _ in range(2):  # the second run has those of the first
            assert one.extra_ports(LOCAL, 2, first) == [(LOCAL, first + 4), (LOCAL, first + 5)]
        with pytest.raises(PlanError, match=f"keeps {first + 2} for tf"):
            one.backend("tf", LOCAL, first + 50)
        assert one.backend("hvd", LOCAL, first) == first + 6  # whose server is still at the other


def test_rank_0_opens_no_door_where_another_run_is_going_to_listen() -> None:
    """Whose processes may not have begun to."""
    with contextlib.ExitStack() as stack:

        def kept(address: str) -> Ports:
            return stack.enter_context(contextlib.closing(Ports(address)))

        others, own = kept(LOCAL), PortLeases(kept)
        first = next(p for p in TOLD if free(others, p))
        assert own.rendezvous(LOCAL, [first, first + 1, first + 2]) == [first + 1, first, first + 2]
        with pytest.raises(PlanError, match="another run has it"):
            others.take(1, first + 1)
        assert own.rendezvous(LOCAL, [first, first + 2])[0] == first + 2
        assert others.take(1, first + 1) == (first + 1,)  # given back


def free(ports: Ports, first: int) -> bool:
    """Whether six ports are; leases the first."""
    try:
        with contextlib.closing(Ports(LOCAL)) as all_of_them:
            all_of_them.take(6, first)
        ports.take(1, first)
    except PlanError:
        return False
    return True


def test_only_the_same_folder_has_the_mark(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with marker_file(tmp_path / "one") as mark:
        assert Path(mark).parent == tmp_path / "one"
        assert Path(mark).is_file()
        assert not (tmp_path / "two" / Path(mark).name).exists()
    assert not [*(tmp_path / "one").iterdir()]
    assert checkpoint_token(str(tmp_path / "one")) is None
    assert checkpoint_token("s3://bucket/run") is not None


def facts(host: str, address: str, local: int | None = None, cpus: Sequence[int] = (0, 1)) -> Facts:
    own = {"host": host, "address": address, "local_rank": local, "port": 7, "cpus": [*cpus]}
    return {**own, "gpus": 0}


def seats(*told: Facts) -> list[tuple[Any, ...]]:
    found = LocalRankAssignment(lambda told: "10.0.0.1")(told)["processes"]
    return [(each["host"], each["local_rank"], each["address"]) for each in found]


def test_a_key_file_that_is_no_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    monkeypatch.setattr(key_module, "FILE", file)
    with pytest.raises(PlanError, match=r"torchrun has started share no secret .* rand -hex 32 > "):
        secret(ON_TWO_HOSTS)
    file.mkdir()
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        secret(ON_TWO_HOSTS)
    file.rmdir()
    file.touch(0o600)
    with pytest.raises(PlanError, match="is empty"):
        secret(ON_TWO_HOSTS)
    file.write_text("secret\n")
    assert secret(ON_TWO_HOSTS) == b"secret"
    file.chmod(0o640)
    with pytest.raises(PlanError, match="other users can read it"):
        secret(ON_TWO_HOSTS)


ON_TWO_HOSTS = ClusterInfo("torchrun", ("RANK",), 0, 2, "job", local_world_size=1)
ON_ONE_HOST = ClusterInfo("torchrun", ("RANK",), 0, 2, "job", local_world_size=2)


def secret(
    where: ClusterInfo, given: str | None = None, *, is_certified: bool = False, **variables: str
) -> bytes:
    return key_module.shared_secret(where, variables, given, is_certified=is_certified)


def test_a_secret_is_what_a_person_says_or_the_engine_or_what_certificates_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_module, "FILE", tmp_path / "none")
    named = tmp_path / "named"
    assert secret(ON_TWO_HOSTS, "the engine's") == b"the engine's"
    assert secret(ON_TWO_HOSTS, "the engine's", ISOTRAIN_KEY="mine") == b"mine"
    with pytest.raises(PlanError, match=f"does not see {named}, which has the key of this run"):
        secret(ON_TWO_HOSTS, "the engine's", ISOTRAIN_KEY_FILE=str(named))
    named.touch(0o600)
    named.write_text("of a file\n")
    assert secret(ON_TWO_HOSTS, ISOTRAIN_KEY_FILE=str(named)) == b"of a file"
    assert secret(ON_TWO_HOSTS, is_certified=True)
    monkeypatch.setattr(key_module, "FILE", named)  # which other hosts may not have
    assert secret(ON_TWO_HOSTS, "the engine's") == b"the engine's"
    assert [each.name for each in tmp_path.iterdir()] == ["named"]


def test_processes_of_one_host_make_a_secret_and_those_of_several_where_they_share_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_module, "FILE", tmp_path / "home" / "key")
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(secret, [ON_ONE_HOST] * 8))
    assert [len(each) for each in made] == [64]
    (file,) = (tmp_path / "home").iterdir()
    assert file.name == f"key-of-{socket.gethostname()}"
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(PlanError, match="share no secret"):
        secret(ON_TWO_HOSTS)
    monkeypatch.setattr(key_module, "is_shared", lambda path: True)
    shared = secret(ON_TWO_HOSTS)
    assert {secret(ON_TWO_HOSTS), secret(ON_ONE_HOST)} == {shared} != made
    assert (tmp_path / "home" / "key").read_bytes().strip() == shared


def test_without_a_home_a_secret_is_made_in_a_folder_that_is_nobody_else_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(key_module, "FILE", tmp_path / "file" / "key")  # no folder can be there
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert secret(ON_ONE_HOST) == secret(ON_ONE_HOST)
    (folder,) = tmp_path.glob("isotrain-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PlanError, match="share no secret"):
        secret(ON_ONE_HOST)
    folder.chmod(0o700)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    folder.rename(tmp_path / f"isotrain-{other}")
    with pytest.raises(PlanError, match="share no secret"):
        secret(ON_ONE_HOST)


MOUNTS = """\
22 1 0:20 / / rw - overlay overlay rw
30 22 0:40 / /home rw,relatime shared:1 - nfs4 server:/home rw
31 30 0:41 / /home/a\\040b rw - ext4 /dev/sda rw
32 22 0:42 / /scratch rw - ext4 /dev/sdb rw
33 22 0:43 / /scratch rw - lustre mds:/scratch rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *(("/root/.config", "overlay"), ("/home/me/.config/isotrain/key", "nfs4")),
        *(("/home/a b/key", "ext4"), ("/homes", "overlay"), ("/scratch/me", "lustre")),
    ],
)
def test_the_kind_of_file_system_is_that_of_the_innermost_and_last(path: str, kind: str) -> None:
    assert files.file_system_type(Path(path), MOUNTS) == kind
    assert not files.is_shared(Path("/proc/self"))


def test_everybody_gets_an_address_that_all_can_reach() -> None:
    """Who called from rank 0's own host may have called by the loopback address."""
    told = (facts("a", ""), facts("a", "127.0.0.1"), facts("b", "10.0.0.2"), facts("b", "10.0.0.2"))
    assert seats(*told) == [
        ("a", 0, "10.0.0.1"),
        ("a", 1, "10.0.0.1"),
        ("b", 0, "10.0.0.2"),
        ("b", 1, "10.0.0.2"),
    ]


def test_local_ranks_are_the_engine_s_where_they_make_sense() -> None:
    assert [s[1] for s in seats(facts("a", "", 1), facts("a", "", 0))] == [1, 0]
    assert [s[1] for s in seats(facts("a", "", 0), facts("a", "", 0))] == [0, 1]


def test_cores_are_shared_by_those_who_share_them() -> None:
    bound = [facts("a", "", cpus=(0, 1)), facts("a", "", cpus=(2, 3))]
    free = [facts("a", "", cpus=range(8)), facts("a", "", cpus=range(8))]
    assert LocalRankAssignment(lambda told: LOCAL)(bound)["cores"] == 2
    assert LocalRankAssignment(lambda told: LOCAL)(free)["cores"] == 4


def replicas(backend: str, strategy: str, processes: int, asked: int | None = None) -> int:
    host = plugin_manager()
    chosen = host.backend(backend), host.strategy(strategy, {})
    return replicas_for("slurm", processes, *chosen, asked)


def test_replicas_are_what_the_processes_make() -> None:
    assert replicas("torch-ddp", "data-parallel", 4) == 4
    assert replicas("torch-ddp", "parameter-server", 4) == 3  # and a coordinator
    with pytest.raises(PlanError, match="3 were requested, and slurm has started 4"):
        replicas("torch-ddp", "data-parallel", 4, 3)
    with pytest.raises(UnsupportedError, match="backend 'tf-mirrored' does not join them"):
        replicas("tf-mirrored", "data-parallel", 2)


def test_messages_are_read_as_they_come_and_no_longer_than_they_may_be() -> None:
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
