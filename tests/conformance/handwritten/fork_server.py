"""Imports a framework once and forks a process for every rank of the scripts that it is told to run.

Run as `python -m conformance.handwritten.fork_server MODULE...`. It reads one JSON line per job: `script`,
`job`, and for each rank `variables` and `logs`, and answers with the exit codes by rank.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

_LOOK_SECONDS = 0.005


def start(
    script: str, job: str, variables: Mapping[str, str], log: str, logs: Sequence[str]
) -> int:
    """Runs a script in a process forked from this one; gives its number.

    Args:
        script: To run.
        job: Its argument.
        variables: Set for it.
        log: Of this rank.
        logs: Of all of them.
    """
    own = os.getpid()
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(variables)
        sys.argv = [script, job]
        runpy.run_path(script, run_name="__main__")
        leave_together(log, logs, own)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def leave_together(log: str, logs: Sequence[str], host: int) -> None:
    """Returns once all ranks have come here, or the host is gone.

    A process that ended while another still received the last of its messages would break its connection.
    """
    _finished(log).touch()
    while os.getppid() == host and not all(_finished(each).exists() for each in logs):
        time.sleep(_LOOK_SECONDS)


def _finished(log: str) -> Path:
    """What says that the rank with this log has come to its end."""
    return Path(f"{log}.finished")


def wait(numbers: list[int]) -> list[int]:
    """Exit codes by rank. Once a rank has failed, the others, which may wait for it, are killed."""
    codes: dict[int, int] = {}
    while len(codes) < len(numbers):
        number, status = os.wait()
        codes[number] = os.waitstatus_to_exitcode(status)
        if codes[number]:
            for other in set(numbers) - set(codes):
                os.kill(other, signal.SIGKILL)
    return [codes[number] for number in numbers]


def main() -> None:
    """Serves until its input ends."""
    for unneeded in (
        "sklearn",
        "matplotlib",
    ):  # which Keras would import: it takes longer than itself
        sys.modules[unneeded] = None  # type: ignore[assignment]
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        order = json.loads(line)
        ranks = zip(order["variables"], order["logs"], strict=True)
        common = order["script"], order["job"]
        numbers = [start(*common, each, log, order["logs"]) for each, log in ranks]
        print(json.dumps(wait(numbers)), flush=True)


if __name__ == "__main__":
    main()
