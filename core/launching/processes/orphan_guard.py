"""Watchdog process that ends the processes of a run when the launching process is gone."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence

_PROGRAM = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
seconds, last = json.loads(sys.argv[1])
groups = []
for line in map(int, sys.stdin):
    groups.append(line) if line > 0 else groups.remove(-line)

def send(number, groups):
    left = []
    for group in groups:
        try:
            os.killpg(group, number)
            left.append(group)
        except OSError:
            pass
    return left

if seconds and groups:
    import subprocess, time
    groups = send(signal.SIGTERM, groups)
    deadline = time.monotonic() + seconds
    for command in last:
        try:
            subprocess.run(command, timeout=seconds)
        except (OSError, subprocess.TimeoutExpired):
            pass
    # no further signal to a group that is gone: its id may be reused
    while (groups := send(0, groups)) and time.monotonic() < deadline:
        time.sleep(0.1)
send(signal.SIGKILL, groups)
"""


class OrphanGuard:
    """Watchdog that kills process groups if this process is killed, whatever state they are in.

    A process that is suspended, or busy in native code, cannot notice that its launcher is gone.
    """

    def __init__(
        self, seconds: float = 0.0, cleanup_commands: Sequence[Sequence[str]] = ()
    ) -> None:
        """Starts the watchdog, which waits for the end of its standard input.

        Args:
            seconds: Time for the groups to end on SIGTERM before SIGKILL; 0: SIGKILL at once.
            cleanup_commands: Commands that end what the groups have started on other hosts; run only if
                `seconds` is not 0.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps([seconds, cleanup_commands])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Adds a process group."""
        self._tell(group)

    def forget(self, group: int) -> None:
        """Removes a process group that has ended; call it before the group is reaped."""
        self._tell(-group)

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"%d\n" % number)
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the watchdog itself; call it before the groups are reaped, whose ids may be reused then."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
