"""Several sessions one after the other in the processes of one run, so that processes start only once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from isotrain.core.contracts.process import from_variables
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.session import Session
from isotrain.core.spec.loading import load_spec
from isotrain.testing.file_exchange import FileExchange
from isotrain.testing.launching import SpecFields, on_device, try_run

Work = Callable[[Session, str], Any]
"""Function that every rank calls with the session of a spec and the name of that spec."""

LONG_TIMEOUTS: SpecFields = {"progress": 280.0}
"""Time-outs, in seconds, of a run with several sessions: only the first reports steps."""


@contextlib.contextmanager
def next_session(
    before: Session, name: str, spec: SpecFields, *, backend: str | None = None
) -> Iterator[Session]:
    """Closes a session and opens another in the same processes. Every rank of the run calls it.

    Args:
        before: Open session, from a launch or from this function; it is closed.
        name: Name of a new folder for the session's files, within the run directory of `before`.
        spec: Spec to train next.
        backend: Backend that starts processes in the same way as the run's; by default the same backend.
    """
    before.close()
    context, resolved = (
        from_variables(os.environ),
        ResolvedSpec(load_spec(on_device(spec)), plugin_manager()),
    )
    assert context is not None, "sessions follow each other in the processes of a launched run"
    folder = before.run_directory / name
    # every process has closed its session before the next one opens, which may use the same ports
    closed = folder / "closed"
    closed.mkdir(parents=True, exist_ok=True)
    FileExchange(closed, before.rank, len(before.plan.processes)).all_gather({})
    requested = before.plan.requested_collective
    same = f"{before.plan.backend}:{requested}" if requested else before.plan.backend
    plan = make_plan(resolved, backend=backend or same, replicas=before.replicas)
    context = dataclasses.replace(context, run_directory=str(folder), device_mesh=plan.device_mesh)
    with Session(resolved, plan, context, Reporter(context.rank)) as session:
        yield session


def in_turn(session: Session, specs: Mapping[str, SpecFields], work: Work) -> dict[str, Any]:
    """Calls a function in a session of each spec, one after the other. The function that each rank runs.

    Returns:
        Return values of `work`, by spec name.
    """
    first, *others = specs
    returned = {first: work(session, first)}
    for number, name in enumerate(others):
        with next_session(session, f"turn-{number}", specs[name]) as session:
            returned[name] = work(session, name)
    return returned


def launched_in_turn(
    specs: Mapping[str, SpecFields], work: Work, backend: str, replicas: int
) -> list[dict[str, Any]]:
    """Launches one run whose processes call a function in a session of each spec.

    Returns:
        Return values of `work`, by rank and spec name.

    Raises:
        AssertionError: The run failed.
    """
    spec = {**next(iter(specs.values())), "timeouts": LONG_TIMEOUTS}
    turns = functools.partial(in_turn, specs=dict(specs), work=work)
    run = try_run(turns, spec, backend, replicas)
    assert run.failure is None, run.failure
    return run.returned
