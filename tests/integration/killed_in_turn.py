"""Runs of several strategies in the processes of one launch, of which one is killed in each of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.killing import Killer

import isotrain
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.contracts.state import ALL_STATE
from isotrain.core.launching.returned import load_value, save_value
from isotrain.core.running.loop import fit
from isotrain.testing.bench import assert_same
from isotrain.testing.series import next_session

WHOLE, KILLED = "whole", "killed"
LATER = {"batch": range(5, 9), "write": range(16, 28)}
"""Moments after a first checkpoint, where one is saved every other step."""


def killers(names: Mapping[str, Any], folder: Path) -> None:
    """Lays down one moment for each; every other is while a checkpoint is written."""
    for number, name in enumerate(names):
        kind = ("batch", "write")[number % 2]
        moment = (kind, random.Random(name).choice(LATER[kind]))
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
    parts = [(name, part) for part in (WHOLE, KILLED) for name in specs]
    count = len(session.plan.processes)
    left = [each for each in parts if not _is_over(folder, each, count)]
    for place, (name, part) in enumerate(left):
        spec = _own(specs[name], folder, name, part)
        with next_session(session, f"start-{attempt}-{place}", spec) as session:
            if CheckpointFolder(folder / name / part).newest() is not None:
                session.restore()
            save_value(_end(session), folder, f"{name}-{part}-{session.rank}")


def _is_over(folder: Path, part: tuple[str, str], processes: int) -> bool:
    """Every process finds the same: none can end a run that another has not begun."""
    return all((folder / f"{'-'.join(part)}-{rank}.json").exists() for rank in range(processes))


def _own(spec: Mapping[str, Any], folder: Path, name: str, part: str) -> dict[str, Any]:
    changes = {"checkpoint": {**spec["checkpoint"], "folder": str(folder / name / part)}}
    if part == KILLED:
        changes["transform"] = Killer(folder / f"{name}-kills")
    return {**spec, **changes}


def _end(session: isotrain.Session) -> dict[str, Any]:
    """All state of this process's replicas, and what has gone into it."""
    metrics, group = fit(session), session.group
    state = {str(r): group.read_state(ALL_STATE, replica=r) for r in group.local_replicas}
    return {"metrics": metrics, "loss": session.last_loss, "state": state}


def difference(folder: Path, name: str, rank: int) -> str:
    """In what the run with the kill ended otherwise than the undisturbed one; nothing where it did not."""
    whole, killed = (load_value(folder, f"{name}-{part}-{rank}") for part in (WHOLE, KILLED))
    try:
        assert_same(killed.pop("state"), whole.pop("state"), f"{name}, rank {rank}")
    except AssertionError as error:
        return str(error)
    return "" if killed == whole else f"{name}, rank {rank}: {killed}, expected {whole}"
