"""How a process ends whose run has failed, where a launcher has started it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from isotrain.core.system.process import exit_after_failure

class Torn:
    def __del__(self):
        print("torn down")

kept = Torn()
work = threading.Thread(target=threading.Event().wait, args=(0.2,), daemon=True)
work.start()
atexit.register(print, "asked at the end")
exit_after_failure(work)
exit_after_failure(work)
"""


INTERRUPTED = """
import atexit, os, signal, sys, threading
from isotrain.core.system.process import exit_process, exit_after_failure

signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    "then", ["exit_process(3)", "exit_after_failure(threading.Thread()); sys.exit(3)"]
)
def test_signals_at_the_end_change_nothing(then: str) -> None:
    """Launchers send signals to all ranks, beside those of the terminal."""
    command = [sys.executable, "-c", INTERRUPTED + then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert not done.stderr


@pytest.mark.parametrize(
    ("then", "code", "printed"),
    [
        ("raise ValueError('of the run')", 1, ["asked at the end"]),
        ("sys.exit(3)", 3, ["asked at the end", "torn down"]),
    ],
)
def test_only_an_uncaught_error_skips_interpreter_shutdown(
    then: str, code: int, printed: list[str]
) -> None:
    """A framework's thread that returns to a finalized interpreter aborts the process."""
    command = [sys.executable, "-c", PROGRAM + then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == printed
    assert ("ValueError: of the run" in done.stderr) == (code == 1)


WAITING = """
import atexit, sys, threading
from isotrain.core.system.process import exit_after_failure

work = threading.Thread(target=threading.Event().wait, daemon=True)
work.start()
atexit.register(work.join)
exit_after_failure(work)
"""


@pytest.mark.parametrize("then", ["raise ValueError('of the run')", "sys.exit(1)"])
def test_an_exit_function_that_waits_for_the_work_does_not_keep_the_process(then: str) -> None:
    """Horovod's waits so while Horovod starts, for as long as its peers may take."""
    command = [sys.executable, "-c", WAITING + then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert ("ValueError: of the run" in done.stderr) == ("ValueError" in then)
