"""The hosts that the other tests start runs on are apart, and leave nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cluster.hosts import end
from cluster.network import Network, sent_bytes
from cluster.two_hosts import TwoHostCluster
from helpers.waiting import wait_until

_PING = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000), timeout=5)
peer.sendall(b"x" * int(sys.argv[2]))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
"""
_LISTEN = """
import socket
door = socket.create_server(("0.0.0.0", 5000))
while True:
    peer = door.accept()[0]
    while peer.recv(1 << 16): pass
    peer.close()
"""
_MAKES_HOSTS = """
import sys
from pathlib import Path
from cluster.hosts import end
from cluster.network import Network
network = Network(Path(sys.argv[1]))
network.hosts[0].check(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"])
print(network.hosts[0].init, flush=True)
sys.stdin.read()
"""


def test_hosts_have_names_and_addresses_of_their_own(bed: TwoHostCluster) -> None:
    first, second = bed.network.hosts
    assert first.check(["hostname"]).strip() == "node1"
    assert second.check(["hostname"]).strip() == "node2"
    assert "10.77.0.2/24" in second.check(["ip", "-brief", "address", "show", "eth0"])
    assert first.check(["getent", "hosts", "node2"]).split()[0] == second.address
    first.check(["touch", "/tmp/of-the-first"])
    assert second.run(["ls", "/tmp/of-the-first"]).returncode
    assert not Path("/tmp/of-the-first").exists()


def test_links_have_the_rate_that_was_asked_for(bed: TwoHostCluster, tmp_path: Path) -> None:
    first, second = bed.network.hosts
    listener = second.start([sys.executable, "-c", _LISTEN], tmp_path / "log")
    count = 2_000_000
    bed.network.shape(100)
    try:
        listening = ["sh", "-c", "ss -ltn | grep -q :5000"]
        wait_until(lambda: not second.run(listening).returncode, 10, "nobody listens")
        before, began = sent_bytes(first), time.monotonic()
        first.check([sys.executable, "-c", _PING, "node2", str(count)])
        assert time.monotonic() - began > 0.8 * count * 8 / 100e6
        assert count < sent_bytes(first) - before < 1.2 * count
    finally:
        end(listener)
        bed.network.unshape()


def test_two_networks_at_once_are_separate(
    bed: TwoHostCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Network(tmp_path_factory.mktemp("other")) as other:
        address = other.hosts[0].address
        assert address == bed.first.address
        names = [h.check(["readlink", "/proc/self/ns/net"]) for h in (other.hosts[0], bed.first)]
        assert names[0] != names[1]


def test_hosts_end_with_their_program(tmp_path: Path, bed: TwoHostCluster) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _MAKES_HOSTS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as maker:
        assert maker.stdout is not None
        init = psutil.Process(int(maker.stdout.readline()))
        held = [init, *psutil.Process(maker.pid).children(recursive=True)]
        maker.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.Process.is_running, held)), 10, f"left: {held}")
    mounts = Path("/proc/self/mounts").read_text()
    assert str(tmp_path) not in mounts
