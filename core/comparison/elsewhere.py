"""The main program of another interpreter that plans or makes a run for a comparison."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from isotrain.core.errors import IsotrainError
from isotrain.core.system.version import VERSION
from isotrain.core.system.whole_file import write_whole


def main() -> None:
    """Reads a task from standard input, does it, and writes `answer.json` to the task's folder."""
    signal.signal(signal.SIGTERM, _unwind)
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    sys.path.extend(folder for folder in task["path"] if folder not in sys.path)
    answer = {"version": VERSION, **_attempt(task)}
    write_whole(Path(task["folder"]) / "answer.json", json.dumps(answer, default=str))


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    """Ends like Ctrl-C, so that the run's processes are ended too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_the_other() -> None:
    """Ends this program when the one that asked is gone: then its pipe is closed."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _attempt(task: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"result": _done(task)}
    except IsotrainError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception as error:  # a defect there must be told here
        traceback.print_exc()
        return {"error": type(error).__name__, "message": f"{type(error).__name__}: {error}"}


def _done(task: Mapping[str, Any]) -> dict[str, Any]:
    from isotrain.core.comparison.measure import Measurement
    from isotrain.core.comparison.runner import plan_here, run_here
    from isotrain.core.spec.files import load_spec

    spec = load_spec(task["spec"])
    if task["do"] == "plan":
        return plan_here(spec, task["backend"], task["replicas"])
    measurement = Measurement(**task["measurement"])
    folder = Path(task["folder"]) / "run"
    return run_here(spec, task["backend"], task["replicas"], measurement, folder)


if __name__ == "__main__":
    main()
