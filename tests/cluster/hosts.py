"""Hosts as namespaces of this machine: each with an address, a name, processes and folders of its own.

A host lives as long as the process that holds it, and this one ends with the program that made it, however
that ends: no process, interface, mount or name is left behind. The network between hosts is in a namespace
too, so two programs that make hosts of the same names and addresses never meet.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")
KEY_FILE = "home/key"
"""In the folder that hosts share, which is on no network; on each of them it is where people keep the key of
their runs, by which processes know each other."""
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")


def why_not() -> str | None:
    """Why no hosts can be made here; None where they can."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"not found: {', '.join(missing)} (Debian: util-linux, iproute2)"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return f"namespaces cannot be made here, which takes root: {tried.stderr.strip()}"
    return None


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: Its host name.
        address: Of its one interface, `eth0`.
        holder: The process that its namespaces end with.
        init: The process that holds them, as seen from here.
        folder: The only folder that hosts share beside what is installed.
    """

    name: str
    address: str
    holder: subprocess.Popen[str]
    init: int
    folder: Path

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs a command there."""
        enter = ["nsenter", "--target", str(self.init), *NAMESPACES, f"--wdns={self.folder}"]
        return [*enter, "--", "env", "--default-signal=INT", f"PATH={self.path}", *command]

    @property
    def path(self) -> str:
        """The PATH of the host: commands of the hosts come first."""
        own = f"{self.folder}/bin:{Path(sys.executable).parent}"
        return f"{own}:/usr/local/bin:{os.defpath}:/usr/sbin:/sbin"

    def start(
        self,
        command: Sequence[str],
        log: Path,
        variables: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> subprocess.Popen[bytes]:
        """Starts a command there, in a process group of its own; its output goes to a file."""
        with log.open("ab") as output, tempfile.TemporaryFile() as given:
            given.write(stdin.encode())
            given.seek(0)
            return subprocess.Popen(
                self.command(command),
                stdin=given,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_all_variables(variables),
            )

    def run(
        self,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        seconds: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command there to its end, or ends it after a while; its error output is in `stdout`."""
        with subprocess.Popen(
            self.command(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
            env=_all_variables(variables),
        ) as process:
            try:
                said, _ = process.communicate(timeout=seconds)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, said)

    def check(
        self,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        seconds: float = 120,
    ) -> str:
        """As `run`; returns the output, and fails with it."""
        done = self.run(command, variables, seconds)
        assert done.returncode == 0, f"{self.name}: {shlex.join(command)}: {done.stdout}"
        return done.stdout

    @property
    def is_lost(self) -> bool:
        """Whether nothing runs there any more."""
        return self.holder.poll() is not None

    def lose(self) -> None:
        """Ends it with all its processes at once, as when power fails."""
        self.holder.kill()
        os.kill(self.init, signal.SIGKILL)
        self.holder.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends what was started on a host, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _all_variables(variables: Mapping[str, str] | None) -> dict[str, str]:
    """Little, so that what a launcher sets is seen."""
    kept = {name: os.environ[name] for name in ("HOME", "PYTHONPATH") if name in os.environ}
    return {"LANG": "C.UTF-8", **kept, **(variables or {})}
