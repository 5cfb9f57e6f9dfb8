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

from isotrain.core.environment import ProcessContext, from_variables
from isotrain.core.events import DESCRIPTOR_VARIABLE, Reporter

EXIT_FAILED = 1


def main() -> None:
    """Reads its job from standard input, does it, and reports how it went."""
    context = from_variables(os.environ)
    descriptor = os.environ.pop(DESCRIPTOR_VARIABLE, None)
    if context is None or descriptor is None:
        sys.exit("isotrain.core.worker is started by isotrain's launcher, not by hand.")
    reporter = Reporter(context.rank, int(descriptor))
    reporter.emit("started", pid=os.getpid())
    _dump_stacks_on_request()
    code = _attempt(context, reporter)
    _leave(code)


def _dump_stacks_on_request() -> None:
    """Lets the launcher ask, by a signal, where every thread of this process is."""
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _attempt(context: ProcessContext, reporter: Reporter) -> int:
    try:
        _do_job(context, reporter)
        reporter.emit("finished")
        return 0
    except BaseException as error:  # whatever ends a process must be reported
        reporter.emit(
            "failed",
            error=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )
        traceback.print_exc()
        return _exit_code(error)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return EXIT_FAILED


def _do_job(context: ProcessContext, reporter: Reporter) -> None:
    import cloudpickle

    from isotrain.core.job import save_value
    from isotrain.core.registry import plugin_host
    from isotrain.core.session import Session

    reporter.enter("read job")
    job = cloudpickle.loads(sys.stdin.buffer.read())
    session = Session(job.spec, job.plan, context, plugin_host(), reporter)
    reporter.emit("ready", plan=session.plan.to_dict() if session.is_main else None)
    value: Any = job.work(session)
    session.close()
    save_value(value, Path(context.run_directory), f"rank-{context.rank}-returned")


def _leave(code: int) -> None:
    """Ends the process without tearing the interpreter down: frameworks' threads may abort in that."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
