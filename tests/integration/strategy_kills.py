"""Runs of several strategies in the processes of one launch, of which one is killed in each of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.random_kills import Killer

import isotrain
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.contracts.state import ALL_STATE
from isotrain.core.launching.run_directory.return_values import load_value, save_value
from isotrain.testing.check_context import assert_same
from isotrain.testing.consecutive_sessions import next_session

WHOLE, KILLED = "whole", "killed"
LATER = {"batch": range(5, 9), "write": range(16, 28)}
"""Moments after a first checkpoint, where one is saved every other step."""


def killers(names: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Lays down one moment for each; every other is while a checkpoint is written, of odd seeds the first."""
    for number, name in enumerate(names, seed):
        kind = ("batch", "write")[number % 2]
        moment = (kind, random.Random(f"{name} {seed}").choice(LATER[kind]))
        Killer.at([moment], folder / f"{name}-kills")


def trained(session: isotrain.Session, specs: Mapping[str, Any], folder: Path) -> None:
    """Trains every strategy to its end, undisturbed and then with a kill, and notes how it ended.

    Processes that were started again go on with the run in which one was killed, from its checkpoint.

    Args:
        session: Closed, for those of the runs.
        specs: By name.
        folder: For checkpoints, and for the ends: `STRATEGY-PART-RANK`.
    """
    attempt = sum(1 for path in folder.glob("*-kills") if not any(path.iterdir()))
    count = len(session.plan.processes)
    left = [name for name in specs if not _is_over(folder, name, count)]
    for place, name in enumerate(left):
        killer = Killer(folder / f"{name}-kills", is_armed=False)
        checkpoint = {**specs[name]["checkpoint"], "folder": str(folder / name)}
        spec = {**specs[name], "checkpoint": checkpoint, "transform": killer}
        with next_session(session, f"start-{attempt}-{place}", spec) as session:
            if CheckpointFolder(folder / name).newest() is not None:
                session.restore()
            else:
                _train_undisturbed(session, folder, name)
            killer.is_armed = True
            save_value(_end(session), folder, f"{name}-{KILLED}-{session.rank}")


def _is_over(folder: Path, name: str, processes: int) -> bool:
    """Whether the run is over, equal on every process: none can end a run that another has not begun."""
    return all((folder / f"{name}-{KILLED}-{rank}.json").exists() for rank in range(processes))


def _train_undisturbed(session: isotrain.Session, folder: Path, name: str) -> None:
    """Saves no checkpoint but that of the start, and goes back there: what was traced is not traced again."""
    start = folder / f"{name}-start"
    session.save(start)
    save_value(_end(session, saves=False), folder, f"{name}-{WHOLE}-{session.rank}")
    session.restore(start)


def _end(session: isotrain.Session, *, saves: bool = True) -> dict[str, Any]:
    """State of this process's replicas, and what has gone into it."""
    metrics = []
    for batch in session.batches():
        session.step(batch)
        if batch.is_last_of_epoch or session.is_done:
            metrics.append(session.metrics())
        if saves:
            session.save_if_due()
    group = session.group
    state = {str(r): group.read_state(ALL_STATE, replica=r) for r in group.local_replicas}
    return {"metrics": metrics[-1], "loss": session.last_loss, "state": state}


def difference(folder: Path, name: str, rank: int) -> str:
    """Differences between the run with the kill and the undisturbed one; empty without any."""
    whole, killed = (load_value(folder, f"{name}-{part}-{rank}") for part in (WHOLE, KILLED))
    try:
        assert_same(killed.pop("state"), whole.pop("state"), f"{name}, rank {rank}")
    except AssertionError as error:
        return str(error)
    return "" if killed == whole else f"{name}, rank {rank}: {killed}, expected {whole}"
