"""A program that saves again and again, each time in a process that is killed at the next system call.

Called with a folder: makes one in it for each call at which a process was killed, named by its number, and
one named `whole` for the last, which met no further call.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from unit.checkpoints.recording_os import CHANGING
from unit.checkpoints.saving import save

FIRST, SECOND = (1, 1, "first"), (2, 2, "second")


def kill_at(place: int) -> None:
    """From now on this process is killed before its call of this number, or in the middle if it writes."""
    calls = itertools.count()

    def killing(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if next(calls) == place:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in CHANGING:
        setattr(os, name, killing(name, getattr(os, name)))


def save_killed(location: Path, place: int) -> bool:
    """Saves in a process of its own; whether it was killed."""
    child = os.fork()
    if not child:
        kill_at(place)
        save(location, *SECOND)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def main(root: Path) -> None:
    """Kills at every call in turn."""
    os.fsync = lambda _: None  # it takes long, and who is only killed needs none
    save(root / "before", *FIRST)
    for place in itertools.count():
        location = root / str(place)
        shutil.copytree(root / "before", location)
        if not save_killed(location, place):
            location.rename(root / "whole")
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
