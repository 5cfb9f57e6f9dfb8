"""What a person calls from Python: run, launch, open_session, plan."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.events import Event
from isotrain.core.contracts.job import Work
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.errors import PlanError
from isotrain.core.launching.look import look
from isotrain.core.launching.run_directory import RunDirectory
from isotrain.core.launching.run_job import run_job
from isotrain.core.loggers.audience import Audience
from isotrain.core.planning.make_plan import Measured, make_plan, with_measures
from isotrain.core.plugins.host import plugin_host
from isotrain.core.running.result import RESULT_FILE, RunResult, result_from_dict
from isotrain.core.running.works import describe, train
from isotrain.core.spec.files import load_spec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.variables import variables_set
from isotrain.core.system.versions import versions

if TYPE_CHECKING:
    from isotrain.core.running.session import Session

SpecLike = TrainingSpec | Mapping[str, Any] | str | os.PathLike[str]
OnEvent = Callable[[Mapping[str, Any]], None]
"""A person's own function: it is told of every event as a mapping."""


def run(
    spec: SpecLike,
    *,
    backend: str,
    replicas: int | None = None,
    run_directory: str | os.PathLike[str] | None = None,
    on_event: OnEvent | None = None,
    port: int | None = None,
    launcher: str = LOCAL,
) -> RunResult:
    """Trains a spec under a backend, in processes of its own on this machine.

    Args:
        spec: A `TrainingSpec`, a mapping of its fields, or a YAML, TOML or JSON file.
        backend: `NAME` or `NAME:COLLECTIVE`, such as `tf-multiworker:ring`.
        replicas: How many; left out: one per usable GPU, or one.
        run_directory: An empty or new folder for the run's files; left out: `runs/<name>-<time>`.
        on_event: Called with each event of the run as it happens; left out: a progress display.
        port: The first port that the backend may use; left out: free ones are found.
        launcher: What starts the processes; `local` starts them on this machine.

    Returns:
        History, metrics, timings, final weights, and where the run's files are.

    Raises:
        SpecError: The spec is wrong.
        PlanError: Spec, backend and replicas do not fit together.
        RunFailedError: A process failed; tells which, where and why.
    """
    asked = _Asked(spec, backend, replicas, launcher, run_directory, on_event, port)
    with _launched(train, asked) as (returned, directory, audience):
        result = result_from_dict(returned[0], directory.path)
        directory.write("plan.json", result.plan)
        directory.write(RESULT_FILE, result.to_dict())
        audience.result = result.to_dict()
    return result


def launch(
    work: Work,
    spec: SpecLike,
    *,
    backend: str,
    replicas: int | None = None,
    run_directory: str | os.PathLike[str] | None = None,
    on_event: OnEvent | None = None,
    port: int | None = None,
    launcher: str = LOCAL,
) -> list[Any]:
    """Runs your own training loop on every process of a run.

    Args:
        work: `work(session)`; see `Session`. It may be defined in the script that calls this.
        spec: As for `run`.
        backend: As for `run`.
        replicas: As for `run`.
        run_directory: As for `run`.
        on_event: As for `run`.
        port: As for `run`.
        launcher: As for `run`.

    Returns:
        What `work` returned on each process, by rank: numbers, text, NumPy arrays, and lists and
        dicts of these.

    Raises:
        SpecError: The spec is wrong.
        PlanError: Spec, backend and replicas do not fit together.
        RunFailedError: A process failed; tells which, where and why.
    """
    asked = _Asked(spec, backend, replicas, launcher, run_directory, on_event, port)
    with _launched(work, asked) as (returned, _, _):
        return returned


def open_session(spec: SpecLike, *, backend: str, replicas: int | None = None) -> Session:
    """Opens a session in this very process, for a loop of your own or a notebook cell.

    Works for every run that is one process: any backend with one replica, and backends that hold
    several replicas in one process. Use it in a `with` statement. For several processes, put your
    loop into a function and give it to `launch`.

    Args:
        spec: As for `run`.
        backend: As for `run`.
        replicas: As for `run`.

    Raises:
        PlanError: The run needs several processes, or Keras already runs on another framework here.
    """
    from isotrain.core.running.session import Session

    given = load_spec(spec)
    host = plugin_host(given.plugins)
    plan = make_plan(given, backend=backend, replicas=replicas, host=host)
    if len(plan.processes) > 1:
        raise PlanError(
            f"{plan.backend!r} with {plan.replicas} replicas takes {len(plan.processes)} processes,"
            " and open_session has this one. Put the loop into a function and call"
            " isotrain.launch(function, spec, backend=..., replicas=...)."
        )
    process = plan.processes[0]
    context = ProcessContext(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        replicas=plan.replicas,
        local_replicas=process.replicas,
        addresses=("127.0.0.1:0",),
        run_directory=tempfile.gettempdir(),
    )
    with variables_set(plan.environment):
        return Session(given, plan, context, host, Reporter())


def plan(
    spec: SpecLike, *, backend: str, replicas: int | None = None, launcher: str = LOCAL
) -> Plan:
    """Resolves a run without starting it.

    Args:
        spec: As for `run`.
        backend: As for `run`.
        replicas: As for `run`.
        launcher: As for `run`.

    Raises:
        PlanError: Spec, backend and replicas do not fit together.
    """
    given = load_spec(spec)
    host = plugin_host(given.plugins)
    return make_plan(given, backend=backend, replicas=replicas, host=host, launcher=launcher)


def measured_plan(
    spec: SpecLike, *, backend: str, replicas: int | None = None, launcher: str = LOCAL
) -> Plan:
    """As `plan`, completed with the numbers of samples, parameters and exchanged bytes.

    The data is loaded and the model built for that, with one replica, in a process of its own.

    Args:
        spec: As for `run`.
        backend: As for `run`.
        replicas: As for `run`.
        launcher: As for `run`.
    """
    given = load_spec(spec)
    host = plugin_host(given.plugins)
    wanted = make_plan(given, backend=backend, replicas=replicas, host=host, launcher=launcher)
    found = look(describe, given, wanted.backend, host)
    return with_measures(
        wanted,
        given,
        Measured(**found),
        strategy=host.strategy(wanted.strategy, wanted.strategy_options),
        adapter=host.backend(wanted.backend),
    )


@dataclass(frozen=True)
class _Asked:
    """The arguments that `run` and `launch` share."""

    spec: SpecLike
    backend: str
    replicas: int | None
    launcher: str
    run_directory: str | os.PathLike[str] | None
    on_event: OnEvent | None
    port: int | None


@contextlib.contextmanager
def _launched(work: Work, asked: _Asked) -> Iterator[tuple[list[Any], RunDirectory, Audience]]:
    """Plans and launches; gives what `work` returned by rank, and who will be told how it ended."""
    given = load_spec(asked.spec)
    host = plugin_host(given.plugins)
    resolved = make_plan(
        given,
        backend=asked.backend,
        replicas=asked.replicas,
        host=host,
        launcher=asked.launcher,
    )
    loggers = [host.logger(chosen.name, chosen.options) for chosen in given.loggers]
    directory = RunDirectory.create(given.name, asked.run_directory)
    packages = versions(host.backend(resolved.backend).packages)
    directory.write_start(given, resolved, packages)
    with Audience(host, loggers, resolved.to_dict(), directory.path) as audience:
        with _display(asked.on_event, resolved) as show:

            def on_event(event: Event) -> None:
                show(event)
                audience.hear(event)

            returned = run_job(
                work, given, resolved, host, directory, on_event=on_event, first_port=asked.port
            )
        yield returned, directory, audience


def _display(
    on_event: OnEvent | None, plan: Plan
) -> contextlib.AbstractContextManager[Callable[[Event], None]]:
    if on_event is not None:
        return contextlib.nullcontext(lambda event: on_event(event.to_dict()))
    from isotrain.core.showing import display

    return display.automatic(plan)
