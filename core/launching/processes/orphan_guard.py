"""A small process that ends a run's processes when the one that started the run is gone."""

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
groups = [int(line) for line in sys.stdin]

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
    # one that is gone is not sent to again: its number may be another's by then
    while (groups := send(0, groups)) and time.monotonic() < deadline:
        time.sleep(0.1)
send(signal.SIGKILL, groups)
"""


class OrphanGuard:
    """Ends process groups for sure should this process be killed, whatever state they are in.

    A process that is suspended, or busy in native code, cannot notice that its launcher is gone.
    """

    def __init__(self, seconds: float = 0.0, last: Sequence[Sequence[str]] = ()) -> None:
        """Starts it; it waits until its standard input ends.

        Args:
            seconds: That the groups have to end on SIGTERM, before they are killed.
            cleanup_commands: Commands that end what the groups have started elsewhere; run where these have
                seconds.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps([seconds, last])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Adds a process group."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"%d\n" % group)
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the guard itself; call it while the groups' numbers are still theirs."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
