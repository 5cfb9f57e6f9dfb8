"""A run in which rank 3 does something at the third step, or never comes. Arguments: a folder, the deed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from integration import scheduler_job

import isotrain
from isotrain.core.planning.cluster_environment import detect_cluster_info

RANK = 3
STEP = 3
MOMENT, ENDED = "moment", "ended-"
"""Files that are made when the rank is lost, or when the others begin to wait for it; and, with its number at
the end, when a rank has its error."""
HEARD_SECONDS = 0.5
"""Until then rank 0 knows at which step this process is."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def go_on() -> None:
    """Something happens from outside."""


FAULT_ACTIONS = {deed.__name__: deed for deed in (kill, stop, go_on)}
ABSENT = "stay_away"
"""What the rank does before it takes its place in the run, instead of a deed."""
START_SECONDS = 5.0
"""In which all must come, where one stays away."""


def work(session: isotrain.Session) -> None:
    for batch in session.batches():
        session.step(batch)
        if session.rank == RANK and batch.step == STEP:
            time.sleep(HEARD_SECONDS)
            Path(sys.argv[1], MOMENT).touch()
            FAULT_ACTIONS[sys.argv[2]]()
        time.sleep(0.05)


def spec() -> dict[str, Any]:
    return {
        "name": "ending",
        "model": scheduler_job.model,
        "data": scheduler_job.data,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 4,
        "epochs": 1000,
        "plugins": ["isotrain.testing.reference"],
    }


def main() -> None:
    fields, folder = spec(), Path(sys.argv[1])
    place = detect_cluster_info()
    assert place is not None
    if sys.argv[2] == ABSENT:
        fields["timeouts"] = {"start": START_SECONDS}
        if place.rank == RANK:
            time.sleep(1000)
        if place.rank == 0:
            (folder / MOMENT).touch()
    try:
        isotrain.launch(
            work,
            fields,
            backend="reference",
            output=folder / "run",
            on_event=lambda event: None,
        )
    except isotrain.IsotrainError:
        (folder / f"{ENDED}{place.rank}").touch()
        raise


if __name__ == "__main__":
    main()
