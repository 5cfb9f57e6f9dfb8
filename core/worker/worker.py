"""The main program of one worker process of a run."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.events import Failed, Finished, Ready, Started, Warned
from isotrain.core.contracts.process import ProcessContext, ServerConnection, from_variables
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.system.process import exit_process, peak_memory_bytes
from isotrain.core.system.standard_streams import line_buffered

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.adapter import Adapter
    from isotrain.core.contracts.job import Job
    from isotrain.core.plugins.resolved_spec import ResolvedSpec
    from isotrain.core.session.checkpointing.handover import StateExchange
    from isotrain.core.worker.elastic import ElasticRun

EXIT_FAILED = 1
_PACKAGE_FOLDER = str(Path(__file__).parents[2]) + os.sep


def main(events: int, status: int, arrays: int) -> None:
    """Reads the job from standard input, runs it, and reports the outcome.

    Args:
        events: Inherited file descriptor to write events to.
        status: Inherited file descriptor of the shared status page.
        arrays: Inherited file descriptor of the file with the job's large arrays.
    """
    context = from_variables(os.environ)
    assert context is not None, "started by isotrain's launcher only"
    for descriptor in (events, status, arrays):
        os.set_inheritable(descriptor, False)
    _dump_stacks_on_signal()
    reporter = Reporter(context.rank, events, status)
    if context.rank == 0:
        _end_between_steps_on_sigterm(reporter)
    reporter.emit(Started(pid=os.getpid()))
    with line_buffered():
        code = _run_job(context, reporter, arrays)
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone
            reporter.flush()
        exit_process(code)


def _dump_stacks_on_signal() -> None:
    """Dumps the stacks of all threads on SIGUSR1, which the launcher sends to a process that hangs."""
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _end_between_steps_on_sigterm(reporter: Reporter) -> None:
    """Makes the first SIGTERM end this process between two steps, so that its weights can be saved."""
    pid = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # a process that this one has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        signal.signal(number, signal.SIG_IGN)  # sent twice: to the process group and to the process
        reporter.ask_to_end()

    signal.signal(signal.SIGTERM, end)


def _run_job(context: ProcessContext, reporter: Reporter, arrays: int) -> int:
    """Runs the job and reports its outcome; returns the exit code."""
    adapter: Adapter | None = None
    try:
        reporter.enter("read job")
        job, resolved_spec = _read_job(arrays)
        adapter = resolved_spec.plugins.backend(job.plan.backend)
        value = run_job_in_worker(job, resolved_spec, context, reporter)
        if context.has_session:
            _save_return_value(value, context, reporter)
        reporter.emit(Finished(peak_memory_bytes=peak_memory_bytes()))
        if context.has_session:
            reporter.wait_for_others()
        return 0
    except BaseException as error:  # whatever ends a process must be reported
        report_failure(error, reporter, adapter)
        return _exit_code(error)


def report_failure(error: BaseException, reporter: Reporter, adapter: Adapter | None) -> None:
    """Reports the error that has ended this process to the launcher, and prints its traceback."""
    from isotrain.core.launching.run_job import PROCESS_LIMIT_REACHED, is_thread_limit
    from isotrain.core.worker.traceback_format import format_traceback, strip_colors

    if is_thread_limit(error):
        error.add_note(PROCESS_LIMIT_REACHED)
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
    """Whether an error, or one of its causes, means that another process was lost."""
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
    """Receives the job, and selects the plugins that it was made with."""
    from isotrain.core.plugins import selection
    from isotrain.core.plugins.manager import plugin_manager
    from isotrain.core.plugins.resolved_spec import ResolvedSpec
    from isotrain.core.system.pickling import receive

    job = receive(sys.stdin.buffer, arrays)
    os.close(arrays)
    selection.set_current(job.plugins)
    return job, ResolvedSpec(job.spec, plugin_manager(job.spec.plugins))


def run_job_in_worker(
    job: Job,
    resolved_spec: ResolvedSpec,
    context: ProcessContext,
    reporter: Reporter,
    on_ready: Callable[[], None] | None = None,
    exchange: StateExchange | None = None,
) -> Any:
    """Runs this process's part of a job. Collective.

    Args:
        job: The job.
        resolved_spec: The job's spec with its plugin references resolved.
        context: Rank, device mesh and run directory of this process.
        reporter: Sends events to the launcher.
        on_ready: Called when data and model are loaded, before the job's function is called.
        exchange: Sends the state of an elastic run to other hosts; None: all processes are on this machine.

    Returns:
        The return value of the job's function; None in a process that has no session.
    """
    from isotrain.core.contracts.backend.adapter_protocols import (
        ABSTRACT,
        RECORDED,
        AbstractBackend,
        takes_values,
    )
    from isotrain.core.contracts.backend.protocol_checks import require
    from isotrain.core.errors import ValuesNeededError
    from isotrain.core.json_format import json_page
    from isotrain.core.session.member_session import MemberSession
    from isotrain.core.session.weights.initial_weights import REPORT_FILE
    from isotrain.core.system.files import atomic_write
    from isotrain.core.worker.traceback_format import one_line

    if job.plan.collective == ABSTRACT:
        recorded = replace(job, plan=replace(job.plan, collective=RECORDED))
        adapter = resolved_spec.plugins.backend(job.plan.backend)
        with require(adapter, AbstractBackend).without_values():
            try:
                return run_job_in_worker(recorded, resolved_spec, context, reporter, on_ready)
            except Exception as error:
                if not takes_values(adapter, error):
                    raise
                raise ValuesNeededError(one_line(error)) from error
    forward_warnings(reporter)
    if context.joins:
        return _elastic_run(job, resolved_spec, context, reporter, exchange).run()
    server_connection = None
    if context.role != "replica":
        server_connection = ServerConnection.of(context, job.key, job.plan.timeouts, reporter)
        if not context.has_session:
            reporter.enter("build model")
            adapter = resolved_spec.plugins.backend(job.plan.backend)
            resolved_spec.strategy.parallel_layout.serve(
                adapter, resolved_spec.spec_with_model, job.plan.backend_config, server_connection
            )
            return None
    resumes = job.resume is not None
    session = MemberSession(
        resolved_spec,
        job.plan,
        context,
        reporter,
        server_connection,
        resumes=resumes,
        may_stop=job.may_stop,
    )
    if session.is_main and session.initial_weights is not None and not resumes:
        report = json_page(session.initial_weights.to_dict())
        atomic_write(session.run_directory / REPORT_FILE, report + "\n")
    if job.resume is not None:
        session.restore(job.resume)
    plan = session.plan.to_dict() if session.is_main else None
    if session.is_main:
        for text in session.plan.warnings:
            if text not in job.plan.warnings:  # known with the model alone
                reporter.emit(Warned(text=text))
    is_first = session.is_main and resolved_spec.spec.elastic is not None
    data = session.data_identity() if is_first else None
    reporter.emit(Ready(samples=session.plan.samples, plan=plan, data=data))
    if on_ready is not None:
        on_ready()
    if resolved_spec.spec.elastic is not None:
        sessions = [session]
        del session  # freed before the next process group is joined
        return _elastic_run(job, resolved_spec, context, reporter, exchange).run(sessions.pop)
    value = job.work(session)
    session.close()
    return value


def _elastic_run(
    job: Job,
    resolved_spec: ResolvedSpec,
    context: ProcessContext,
    reporter: Reporter,
    exchange: StateExchange | None,
) -> ElasticRun:
    from isotrain.core.worker.elastic import ElasticRun

    adapter = resolved_spec.plugins.backend(job.plan.backend)
    blames_peer = functools.partial(_blames_peer, adapter=adapter)
    lead = functools.partial(_end_between_steps_on_sigterm, reporter)
    return ElasticRun(job, resolved_spec, context, reporter, blames_peer, lead, exchange)


def forward_warnings(reporter: Reporter) -> None:
    """Sends warnings of isotrain to the launcher, besides showing them in this process's output."""
    show = warnings.showwarning

    def forward(
        message: Warning | str, category: type[Warning], filename: str, *args: Any, **kwargs: Any
    ) -> None:
        if filename.startswith(_PACKAGE_FOLDER):
            reporter.emit(Warned(text=str(message)))
        show(message, category, filename, *args, **kwargs)

    warnings.showwarning = forward


def _save_return_value(value: Any, context: ProcessContext, reporter: Reporter) -> None:
    from isotrain.core.launching.run_directory.return_values import save_value

    reporter.enter("save what was returned")
    save_value(value, Path(context.run_directory), f"rank-{context.rank}-returned")
