"""The thread that runs this rank's part of a job, while the main thread supervises or relays."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from isotrain.core.contracts.events import Finished, Started
from isotrain.core.contracts.job import Job
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.contracts.reporter import AWAITING_OTHERS
from isotrain.core.errors import EndedError
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.rendezvous.local_reporter import LocalReporter
from isotrain.core.rendezvous.state_exchange import StateExchange
from isotrain.core.system.process import note_framework_use, peak_memory_bytes
from isotrain.core.worker.worker import report_failure, run_job_in_worker

END_SECONDS = 2.0
"""Seconds that the thread has to end by itself when the run has failed."""
_POLL_SECONDS = 0.1


class WorkerThread(threading.Thread):
    """Runs a job, and reports its end or failure."""

    def __init__(
        self,
        job: Job,
        resolved_spec: ResolvedSpec,
        context: ProcessContext,
        reporter: LocalReporter,
        on_returned: Callable[[Any], None],
        exchange: StateExchange,
    ) -> None:
        """Makes the thread; `on_returned` gets the job's return value before its end is reported."""
        super().__init__(name="isotrain-work", daemon=True)
        self._job = job
        self._resolved_spec = resolved_spec
        self._context = context
        self._reporter = reporter.reporter
        self._on_returned = on_returned
        self._exchange = exchange
        self._may_begin = threading.Event()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Runs the job (called by `threading`)."""
        note_framework_use()
        reporter = self._reporter
        reporter.emit(Started(pid=os.getpid()))
        adapter = self._resolved_spec.plugins.backend(self._job.plan.backend)
        try:
            value = run_job_in_worker(
                self._job,
                self._resolved_spec,
                self._context,
                reporter,
                self._await_others,
                self._exchange,
            )
            self._on_returned(value)
            reporter.emit(Finished(peak_memory_bytes=peak_memory_bytes()))
        except BaseException as error:  # any error must be reported
            report_failure(error, reporter, adapter)

    def begin(self) -> None:
        """Allows the first step: all other ranks are ready too."""
        self._may_begin.set()

    def _await_others(self) -> None:
        self._reporter.enter(AWAITING_OTHERS)
        while not self._may_begin.wait(_POLL_SECONDS):
            if self._is_over.is_set():
                raise EndedError("the run has ended before its first step")

    def end(self, seconds: float) -> None:
        """Makes the job end at its next call into isotrain; waits for at most so many seconds."""
        self._is_over.set()
        self._reporter.end_soon()
        self.join(seconds)
