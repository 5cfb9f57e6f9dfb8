"""The main program of one process of a run."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import Failed, Finished, Ready, Started
from isotrain.core.contracts.process import ProcessContext, from_variables
from isotrain.core.contracts.reporter import Reporter

EXIT_FAILED = 1


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
    reporter.emit(Started(pid=os.getpid()))
    _leave(_attempt(context, reporter, arrays))


def _dump_stacks_on_request() -> None:
    """Lets the launcher ask, by a signal, where every thread of this process is."""
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _attempt(context: ProcessContext, reporter: Reporter, arrays: int) -> int:
    try:
        _do_job(context, reporter, arrays)
        reporter.emit(Finished())
        reporter.wait_for_others()
        return 0
    except BaseException as error:  # whatever ends a process must be reported
        _report_failure(error, reporter)
        return _exit_code(error)


def _report_failure(error: BaseException, reporter: Reporter) -> None:
    lines = traceback.format_exception(error)
    text = "".join(traceback.format_exception_only(error)).strip()
    message = text.removeprefix(f"{type(error).__module__}.")
    kind = type(error).__name__
    reporter.emit(Failed(error=kind, message=message, traceback="".join(lines)))
    with contextlib.suppress(OSError):  # a full disk
        sys.stderr.writelines(lines)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return EXIT_FAILED


def _do_job(context: ProcessContext, reporter: Reporter, arrays: int) -> None:
    reporter.enter("read job")
    from isotrain.core.contracts.service import Service
    from isotrain.core.launching.payload import receive
    from isotrain.core.launching.returned import save_value
    from isotrain.core.plugins import choice as plugin_choice
    from isotrain.core.plugins.host import plugin_host
    from isotrain.core.plugins.named_model import with_named_model
    from isotrain.core.running.session import Session

    job = receive(sys.stdin.buffer, arrays)
    os.close(arrays)
    plugin_choice.take_over(job.plugins)
    host = plugin_host(job.spec.plugins)
    service = Service.of(context, job.key, job.plan.timeouts, reporter)
    if context.role in ("worker", "server"):
        spec = with_named_model(job.spec, host)
        host.backend(job.plan.backend).serve(spec, job.plan.setting, service)
        return
    session = Session(job.spec, job.plan, context, host, reporter, service)
    reporter.emit(Ready(plan=session.plan.to_dict() if session.is_main else None))
    value: Any = job.work(session)
    session.close()
    reporter.enter("save what was returned")
    save_value(value, Path(context.run_directory), f"rank-{context.rank}-returned")


def _leave(code: int) -> None:
    """Ends the process without tearing the interpreter down: frameworks' threads may abort in that."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
