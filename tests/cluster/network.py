"""A few hosts on one switch, all of it in namespaces."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from cluster.hosts import KEY_FILE, NAMESPACES, Host

INTERFACE, OTHER = "eth0", "eth1"
_INIT = Path(__file__).with_name("host_init.sh")
_HOLD = "import sys; print('ready', flush=True); sys.stdin.read()"
_PREFIX, _OTHER_PREFIX = "10.77.0", "10.78.0"


class Network:
    """Hosts that see each other and nothing else; use it in a `with` statement.

    Attributes:
        folder: The only folder that the hosts share beside what is installed.
        hosts: All of them.
    """

    def __init__(self, folder: Path, names: Sequence[str] = ("node1", "node2")) -> None:
        """Makes them.

        Args:
            folder: An empty one under /tmp.
            names: Of the hosts.
        """
        self.folder = folder
        addresses = {name: f"{_PREFIX}.{number}" for number, name in enumerate(names, start=1)}
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        (folder / "etc" / "ssh").mkdir(parents=True)
        (folder / KEY_FILE).parent.mkdir()
        (folder / KEY_FILE).touch(0o600)
        (folder / KEY_FILE).write_text(secrets.token_hex())
        (folder / "etc" / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        self._holders: list[subprocess.Popen[str]] = []
        try:
            self._switch = self._held(["unshare", "--net", sys.executable, "-S", "-c", _HOLD])
            self._in_switch("link", "add", "switch", "type", "bridge")
            self._in_switch("link", "set", "switch", "up")
            self.hosts = tuple(self._host(name, address) for name, address in addresses.items())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every host."""
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
        for holder in self._holders:
            with holder:
                holder.wait(30)

    def shape(self, mbit: int, hosts: Sequence[Host] | None = None) -> None:
        """Gives the links of these hosts, or of all, this rate in both directions."""
        burst = str(mbit * 1_000_000 // 8 // 100)  # bytes: of 10 ms
        how = ("root", "tbf", "rate", f"{mbit}mbit", "burst", burst, "latency", "100ms")
        for host in self.hosts if hosts is None else hosts:
            host.check(["tc", "qdisc", "replace", "dev", INTERFACE, *how])
            self._enter("tc", "qdisc", "replace", "dev", _port(host), *how)

    def unshape(self) -> None:
        """Takes the limits away."""
        for host in self.hosts:
            host.check(["tc", "qdisc", "delete", "dev", INTERFACE, "root"])
            self._enter("tc", "qdisc", "delete", "dev", _port(host), "root")

    def unplug(self, host: Host) -> None:
        """Takes the cable out: nobody is told."""
        self._in_switch("link", "set", _port(host), "nomaster")

    def down(self, host: Host) -> None:
        """Ends the host's link from its own end, which it is told."""
        host.check(["ip", "link", "set", INTERFACE, "down"])

    @contextlib.contextmanager
    def with_other_interface(self) -> Iterator[None]:
        """Within it, the first two hosts also have interfaces `eth1`, which see each other and no others."""
        first, second = self.hosts[:2]
        ends = [("name", OTHER, "netns", str(host.init)) for host in (first, second)]
        self._in_switch("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        try:
            for number, host in enumerate((first, second), start=1):
                address = f"{_OTHER_PREFIX}.{number}/24"
                host.check(["ip", "address", "add", address, "dev", OTHER])
                # Nothing is sent by it but what is asked for: no IPv6 that looks around.
                host.check(["ip", "link", "set", OTHER, "addrgenmode", "none", "up"])
            yield
        finally:
            first.check(["ip", "link", "delete", OTHER])

    def plug(self, host: Host) -> None:
        """Puts it in again."""
        self._in_switch("link", "set", _port(host), "master", "switch")

    def _host(self, name: str, address: str) -> Host:
        apart = ["unshare", *NAMESPACES, "--fork", "--mount-proc"]
        holder = self._held([*apart, "sh", str(_INIT), name, str(self.folder), sys.executable])
        (init,) = psutil.Process(holder.pid).children()
        host = Host(name, address, holder, init.pid, self.folder)
        peer = ("peer", "name", INTERFACE, "netns", str(init.pid))
        self._in_switch("link", "add", _port(host), "type", "veth", *peer)
        self._in_switch("link", "set", _port(host), "master", "switch", "up")
        host.check(["ip", "address", "add", f"{address}/24", "dev", INTERFACE])
        host.check(["ip", "link", "set", INTERFACE, "up"])
        return host

    def _held(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Starts what holds a namespace for as long as this program lives."""
        holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n", f"{command} did not begin"
        return holder

    def _in_switch(self, *arguments: str) -> None:
        self._enter("ip", *arguments)

    def _enter(self, *command: str) -> None:
        target = str(self._switch.pid)
        subprocess.run(["nsenter", "--target", target, "--net", "--", *command], check=True)


def sent_bytes(host: Host, interface: str = INTERFACE) -> int:
    """What has left the host by an interface so far."""
    (found,) = json.loads(host.check(["ip", "-statistics", "-json", "link", "show", interface]))
    return int(found["stats64"]["tx"]["bytes"])


def _port(host: Host) -> str:
    return f"to-{host.name}"
