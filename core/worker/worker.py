"""The main program of one process of a run."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.events import Failed, Finished, Ready, Started, Warned
from isotrain.core.contracts.process import ProcessContext, from_variables
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.system.process import exit_process
from isotrain.core.system.standard_streams import line_buffered

if TYPE_CHECKING:
    from isotrain.core.contracts.adapter import Adapter
    from isotrain.core.contracts.job import Job
    from isotrain.core.plugins.resolved_spec import ResolvedSpec

EXIT_FAILED = 1
_OURS = str(Path(__file__).parents[2]) + os.sep
"""The folder of this package."""


def main(events: int, status: int, arrays: int) -> None:
    """Reads its job from standard input, does it, and reports how it went.

    Args:
        events: Inherited descriptor to write events to.
        status: Of the status page.
        arrays: Of the file with the job's large arrays.
    """
    context = from_variables(os.environ)
    assert context is not None, "started by isotrain's launcher only"
    for descriptor in (events, status, arrays):
        os.set_inheritable(descriptor, False)
    _dump_stacks_on_request()
    reporter = Reporter(context.rank, events, status)
    if context.rank == 0:
        _end_after_the_step(reporter)
    reporter.emit(Started(pid=os.getpid()))
    with line_buffered():
        code = _attempt(context, reporter, arrays)
        with contextlib.suppress(BrokenPipeError):  # who started it is gone
            reporter.flush()
        exit_process(code)


def _dump_stacks_on_request() -> None:
    """Lets the launcher ask, by a signal, where every thread of this process is."""
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _end_after_the_step(reporter: Reporter) -> None:
    """Lets the first SIGTERM end this process where the weights are whole, so that they can be kept."""
    own = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # a process that this one has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        signal.signal(number, signal.SIG_IGN)  # it comes to the group and to the process: twice
        reporter.ask_to_end()

    signal.signal(signal.SIGTERM, end)


def _attempt(context: ProcessContext, reporter: Reporter, arrays: int) -> int:
    adapter: Adapter | None = None
    try:
        reporter.enter("read job")
        job, cast = _read_job(arrays)
        adapter = cast.plugins.backend(job.plan.backend)
        value = run_job_in_worker(job, cast, context, reporter)
        if context.has_session:
            _save(value, context, reporter)
        reporter.emit(Finished())
        if context.has_session:
            reporter.wait_for_others()
        return 0
    except BaseException as error:  # whatever ends a process must be reported
        report_failure(error, reporter, adapter)
        return _exit_code(error)


def report_failure(error: BaseException, reporter: Reporter, adapter: Adapter | None) -> None:
    """Tells of an error that has ended the work of this process."""
    from isotrain.core.worker.traceback_format import format_traceback, strip_colors

    text = "".join(traceback.format_exception_only(error)).strip()
    message = strip_colors(text.removeprefix(f"{type(error).__module__}."))
    reporter.emit(
        Failed(
            error=type(error).__name__,
            message=message,
            traceback=format_traceback(error),
            is_peer_error=_blames_peer(error, adapter),
        )
    )
    with contextlib.suppress(OSError):  # a full disk
        sys.stderr.writelines(traceback.format_exception(error))


def _blames_peer(error: BaseException | None, adapter: Adapter | None) -> bool:
    """Whether an error, or one that it was raised from, tells that another process is gone."""
    from isotrain.core.errors import PeerLostError

    with contextlib.suppress(Exception):  # a fault of the adapter must not hide this one
        while error is not None:
            if isinstance(error, PeerLostError) or (adapter and adapter.is_peer_error(error)):
                return True
            error = error.__cause__
    return False


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return EXIT_FAILED


def _read_job(arrays: int) -> tuple[Job, ResolvedSpec]:
    """Takes the job, and makes known what plugins it was made with."""
    from isotrain.core.launching.processes.job_pickle import receive
    from isotrain.core.plugins import selection
    from isotrain.core.plugins.manager import plugin_manager
    from isotrain.core.plugins.resolved_spec import ResolvedSpec

    job = receive(sys.stdin.buffer, arrays)
    os.close(arrays)
    selection.set_current(job.plugins)
    return job, ResolvedSpec(job.spec, plugin_manager(job.spec.plugins))


def run_job_in_worker(
    job: Job,
    cast: ResolvedSpec,
    context: ProcessContext,
    reporter: Reporter,
    on_ready: Callable[[], None] | None = None,
) -> Any:
    """Does this process's part of a run.

    Args:
        job: What to do.
        cast: What takes part; its spec is the job's.
        context: This process's place.
        reporter: Tells whoever watches.
        on_ready: Called when data and model are there, before the work begins.

    Returns:
        What the work has returned; None in a process that has no session.
    """
    from isotrain.core.contracts.process import ServerConnection
    from isotrain.core.json_format import json_page
    from isotrain.core.session.session import Session
    from isotrain.core.session.weights.initial_weights import REPORT_FILE
    from isotrain.core.system.files import atomic_write

    forward_warnings(reporter)
    server_connection = ServerConnection.of(context, job.key, job.plan.timeouts, reporter)
    if not context.has_session:
        reporter.enter("build model")
        adapter = cast.plugins.backend(job.plan.backend)
        cast.strategy.parallel_layout.serve(
            adapter, cast.spec_with_model, job.plan.backend_config, server_connection
        )
        return None
    resumes = job.resume is not None
    session = Session(cast, job.plan, context, reporter, server_connection, resumes=resumes)
    if session.is_main and session.initial_weights is not None and not resumes:
        report = json_page(session.initial_weights.to_dict())
        atomic_write(session.run_directory / REPORT_FILE, report + "\n")
    if job.resume is not None:
        session.restore(job.resume)
    measured = session.plan
    plan = measured.to_dict() if session.is_main else None
    reporter.emit(Ready(samples=measured.samples, plan=plan))
    if on_ready is not None:
        on_ready()
    value = job.work(session)
    session.close()
    return value


def forward_warnings(reporter: Reporter) -> None:
    """Has whoever watches the run told of what isotrain warns of here, besides this process's own output."""
    shown = warnings.showwarning

    def tell(
        message: Warning | str, category: type[Warning], filename: str, *given: Any, **options: Any
    ) -> None:
        if filename.startswith(_OURS):
            reporter.emit(Warned(text=str(message)))
        shown(message, category, filename, *given, **options)

    warnings.showwarning = tell


def _save(value: Any, context: ProcessContext, reporter: Reporter) -> None:
    from isotrain.core.launching.run_directory.return_values import save_value

    reporter.enter("save what was returned")
    save_value(value, Path(context.run_directory), f"rank-{context.rank}-returned")
