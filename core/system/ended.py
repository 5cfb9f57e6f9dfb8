"""Whether and how child processes have ended, while their numbers are still theirs.

`Popen.poll` and `Popen.wait` give the number of an ended process back, and that of its group with the last of
its members: a signal to them may then end somebody else's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import Any

_LOOK_SECONDS = 0.02


def exit_code(process: subprocess.Popen[Any]) -> int | None:
    """None while it runs; negative when a signal ended it. It keeps its number until `process.wait()`."""
    if process.returncode is not None:
        return process.returncode
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else in this program has collected it
        return process.poll()
    return None if ended is None else exit_code_from(ended)


def wait_for_end(process: subprocess.Popen[Any], seconds: float | None = None) -> None:
    """Returns when it has ended, and keeps its number; or after so many seconds."""
    if process.returncode is not None:
        return
    if seconds is None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return
    deadline = time.monotonic() + seconds
    while exit_code(process) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def exit_code_from(ended: os.waitid_result) -> int:
    """The exit code of a process that has ended; negative when a signal ended it."""
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
