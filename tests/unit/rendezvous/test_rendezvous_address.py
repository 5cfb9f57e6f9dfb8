"""Where rank 0 listens: interfaces, addresses and ports."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import Any

import pytest
from unit.rendezvous.rendezvous_helpers import LOCAL

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.errors import PlanError
from isotrain.core.launching.processes.ports import PORTS, PortLeases, Ports
from isotrain.core.rendezvous import interfaces
from isotrain.core.rendezvous.interfaces import RendezvousAddress


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
def test_rank_0_listens_where_the_others_connect(
    coordinator: str, found: str | None, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str) -> str:
        if found is None:
            raise socket.gaierror("unknown")
        return found

    monkeypatch.setattr(interfaces.socket, "gethostbyname", resolve)
    there = ClusterInfo("torchrun", ("RANK",), 0, 2, "job", coordinator=coordinator)
    for interface in ("", "lo"):  # which is for what comes after the door
        assert RendezvousAddress.of(there, interface) == RendezvousAddress(coordinator, listening)


@pytest.mark.parametrize("told", [{"hosts": ("n1",)}, {"local_world_size": 2}])
def test_on_one_host_all_use_the_same_address(told: dict[str, Any]) -> None:
    for interface, expected in (("", LOCAL), ("127.0.0.9", "127.0.0.9")):
        for rank in (0, 1):
            there = ClusterInfo("mpich", ("PMI_RANK",), rank, 2, "job", coordinator="n1", **told)
            assert RendezvousAddress.of(there, interface) == RendezvousAddress(expected, expected)


def test_an_interface_is_chosen_by_option_or_variable_and_must_exist() -> None:
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


def test_an_unknown_coordinator_is_an_error_with_the_variable() -> None:
    with pytest.raises(PlanError, match="Set ISOTRAIN_COORDINATOR"):
        RendezvousAddress.of(ClusterInfo("mpich", ("PMI_RANK",), 1, 2, "job"), "")


TOLD = range(PORTS.stop + 100, PORTS.stop + 700, 10)
"""Between the ports that runs take by themselves and those that systems hand out."""


def test_ports_after_a_requested_one_are_free_ones() -> None:
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


def test_rank_0_leaves_ports_that_another_run_has_leased() -> None:
    """That run's processes may not listen yet."""
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


def test_leases_of_this_process_are_closed_when_it_ends() -> None:
    """The interpreter would warn of an unclosed socket."""
    program = (
        "from isotrain.core.launching.processes.ports import PORT_LEASES\n"
        f"PORT_LEASES.backend('tf', '{LOCAL}', None)\n"
        f"PORT_LEASES.extra_ports('{LOCAL}', 1, None)\n"
    )
    command = [sys.executable, "-W", "always", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
