"""Checks of how failing runs end: a process is killed, or hangs."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from isotrain.core.contracts.plan import split_backend
from isotrain.core.data.sample_rng import SampleRandom
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.session import Session
from isotrain.testing import reference_model
from isotrain.testing.launching import Notes, Run, try_run

STEP = 3
"""Step after which the last process is killed or hangs."""
PROGRESS_SECONDS = (3.0, 12.0, 60.0)
"""Progress time-outs to try, in seconds; on a busy host a run may end by the first before it hangs."""
PATIENCE_SECONDS = 50.0
"""Time in seconds for the launcher to notice the failure and to end all processes."""

_OF_ONE_SIZE = {"global_batch_size": 6, "drop_remainder": True}
"""Spec fields for slices of one size, so that frameworks trace and compile once."""

_hanging = False


def crash(backend: str, replicas: int) -> None:
    """When a process is killed, the run ends soon and says which, and how; the others blame a peer."""
    run = try_run(_killed_late, _spec(backend), backend, replicas)
    failed_rank = _failed_rank(run, PATIENCE_SECONDS)
    expected = f"{failed_rank} was ended by SIGKILL"
    assert str(run.failure).startswith(expected), f"{run.failure}\nexpected: {expected}"
    for error in _errors_of_no_peer(run):
        raise AssertionError(
            f"`is_peer_error` takes this for a fault of the process itself: {error}"
        )
    run.forget()


def hang(backend: str, replicas: int) -> None:
    """When a process makes no progress, the run ends after the time-out and says which, and where."""
    for limit in PROGRESS_SECONDS:
        spec = _spec(backend, transform=stand_still, timeouts={"progress": limit})
        run = try_run(_hanging_late, spec, backend, replicas)
        if _failure_times(run):
            break
    failed_rank = _failed_rank(run, limit + PATIENCE_SECONDS)
    expected = f"{failed_rank} made no progress for "
    assert str(run.failure).startswith(expected), f"{run.failure}\nexpected: {expected}"
    assert "'next batch'" in str(run.failure), f"the call is not named: {run.failure}"
    run.forget()


def stand_still(inputs: Any, targets: Any, random: SampleRandom) -> tuple[Any, Any]:
    """Transform of the spec: changes nothing, and hangs once `_hanging` is set in this process."""
    if _hanging:
        time.sleep(600)
    return inputs, targets


def _spec(backend: str, **changes: Any) -> dict[str, Any]:
    adapter = plugin_manager().backend(split_backend(backend)[0])
    return reference_model.spec(adapter, epochs=None, steps=100_000, **_OF_ONE_SIZE, **changes)


def _killed_late(session: Session) -> None:
    _train(session)
    if _is_last(session):
        Notes(session).add("failure_time", time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    _train(session, steps=100_000)


def _hanging_late(session: Session) -> None:
    global _hanging
    _train(session)
    if _is_last(session):
        Notes(session).add("failure_time", time.time())
        _hanging = True
    _train(session, steps=100_000)


def _train(session: Session, steps: int = STEP) -> None:
    for batch in session.batches():
        session.step(batch)
        if batch.step >= steps:
            return


def _is_last(session: Session) -> bool:
    return session.rank == len(session.plan.processes) - 1


def _errors_of_no_peer(run: Run) -> list[str]:
    """Errors of processes that were not reported as caused by a lost peer."""
    lines = (run.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    failed = [event for event in map(json.loads, lines) if event["event"] == "failed"]
    return [event["message"] for event in failed if not event["is_peer_error"]]


def _failed_rank(run: Run, limit: float) -> str:
    """Asserts that the run failed within `limit` seconds; returns how its error must begin: the last rank."""
    assert run.failure is not None, "the run ended as if nothing had happened"
    times = _failure_times(run)
    assert times, f"the run failed before that: {run.failure}"
    seconds = run.ended - times[0]
    assert seconds <= limit, f"it took {seconds:.1f} s to end the run; expected at most {limit:g} s"
    return f"rank {max(run.notes)} of {max(run.notes) + 1}"


def _failure_times(run: Run) -> list[float]:
    """Times of the kill or hang, in seconds since 1970; empty if the run ended before it."""
    return [notes["failure_time"] for notes in run.notes.values() if "failure_time" in notes]
