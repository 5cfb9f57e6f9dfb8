"""How a process ends whose joined run has failed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from isotrain.core.system.leaving import leave_after_failure

class Torn:
    def __del__(self):
        print("torn down")

kept = Torn()
work = threading.Thread(target=threading.Event().wait, args=(0.2,), daemon=True)
work.start()
atexit.register(print, "asked at the end")
leave_after_failure(work)
leave_after_failure(work)
"""


@pytest.mark.parametrize(
    ("then", "code", "printed"),
    [
        ("raise ValueError('of the run')", 1, ["asked at the end"]),
        ("sys.exit(3)", 3, ["asked at the end", "torn down"]),
    ],
)
def test_only_an_error_that_nobody_catches_ends_it_untorn(
    then: str, code: int, printed: list[str]
) -> None:
    """A thread of a framework that comes back to a torn interpreter aborts the process."""
    command = [sys.executable, "-c", PROGRAM + then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == printed
    assert ("ValueError: of the run" in done.stderr) == (code == 1)
