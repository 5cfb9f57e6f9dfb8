"""Several sessions, one after the other, in the processes of one run: they are started once for all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from isotrain.core.contracts.process import from_variables
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.session import Session
from isotrain.core.spec.loading import load_spec
from isotrain.testing.file_exchange import FileExchange
from isotrain.testing.launching import SpecFields, try_run

Work = Callable[[Session, str], Any]
"""What every process does in the session of a spec, whose name it is told."""

LONG_TIMEOUTS: SpecFields = {"progress": 280.0}
"""Time-outs of a run whose processes take up one session after the other: only the first reports steps."""


@contextlib.contextmanager
def next_session(
    before: Session, name: str, spec: SpecFields, *, backend: str | None = None
) -> Iterator[Session]:
    """Closes a session and opens another in the same processes. Called by every process of the run.

    Args:
        before: The session until now: of a launch, or of this function.
        name: A folder for its files, new in that of `before`.
        spec: What is trained next.
        backend: Under what: one that starts processes just as the run's own does; left out, the same.
    """
    before.close()
    context, cast = from_variables(os.environ), ResolvedSpec(load_spec(spec), plugin_manager())
    assert context is not None, "sessions follow each other in the processes of a launched run"
    folder = before.run_directory / name
    _meet(before, folder / "meeting")
    plan = make_plan(cast, backend=backend or before.plan.backend, replicas=before.replicas)
    here = dataclasses.replace(context, run_directory=str(folder), device_mesh=plan.device_mesh)
    with Session(cast, plan, here, Reporter(here.rank)) as session:
        yield session


def in_turn(session: Session, specs: Mapping[str, SpecFields], work: Work) -> dict[str, Any]:
    """Does work in a session of each spec, one after the other; a run's work.

    Args:
        session: Of the first spec.
        specs: By name.
        work: What is done.

    Returns:
        What it gave, by name.
    """
    first, *others = specs
    found = {first: work(session, first)}
    for number, name in enumerate(others):
        with next_session(session, f"turn-{number}", specs[name]) as session:
            found[name] = work(session, name)
    return found


def launched_in_turn(
    specs: Mapping[str, SpecFields], work: Work, backend: str, replicas: int
) -> list[dict[str, Any]]:
    """Launches one run whose processes do work in a session of each spec.

    Args:
        specs: By name.
        work: What is done.
        backend: `NAME` or `NAME:COLLECTIVE`.
        replicas: How many.

    Returns:
        By rank and name, what it gave.

    Raises:
        AssertionError: The run failed.
    """
    spec = {**next(iter(specs.values())), "timeouts": LONG_TIMEOUTS}
    turns = functools.partial(in_turn, specs=dict(specs), work=work)
    run = try_run(turns, spec, backend, replicas)
    assert run.failure is None, run.failure
    return run.returned


def _meet(closed: Session, folder: Path) -> None:
    """Waits until every process has closed its session: what comes next may use the same ports."""
    folder.mkdir(parents=True, exist_ok=True)
    FileExchange(folder, closed.rank, len(closed.plan.processes)).all_gather({})
