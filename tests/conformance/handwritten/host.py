"""Imports a framework once and forks a process for every rank of the scripts that it is told to run.

Run as `python -m conformance.handwritten.host MODULE...`. It reads a line of JSON for each job: `script`,
`job`, and for each rank `variables` and `logs`, and answers with the exit codes by rank.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping


def start(script: str, job: str, variables: Mapping[str, str], log: str) -> int:
    """Runs a script in a process forked from this one; gives its number."""
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
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(numbers: list[int]) -> list[int]:
    """Exit codes by rank. Once a rank has failed, the others, which may wait for it, are killed."""
    codes: dict[int, int] = {}
    while len(codes) < len(numbers):
        number, status = os.wait()
        codes[number] = os.waitstatus_to_exitcode(status)
        if codes[number] > 0:
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
        numbers = [start(order["script"], order["job"], each, log) for each, log in ranks]
        print(json.dumps(wait(numbers)), flush=True)


if __name__ == "__main__":
    main()
