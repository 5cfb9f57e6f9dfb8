"""The work of this process in a joined run: on a thread of its own, while the main thread watches."""

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
from isotrain.core.system.process import note_framework_use
from isotrain.core.worker.worker import report_failure, run_job_in_worker

END_SECONDS = 2.0
"""That the work of a process has to end by itself when its run has failed."""
_LOOK_SECONDS = 0.1


class WorkerThread(threading.Thread):
    """Does a job; what becomes of it is told to the reporter."""

    def __init__(
        self,
        job: Job,
        cast: ResolvedSpec,
        context: ProcessContext,
        line: LocalReporter,
        hand_over: Callable[[Any], None],
    ) -> None:
        """Prepares.

        Args:
            job: To do.
            cast: What takes part, as it was planned with.
            context: Of this process.
            line: Of it.
            hand_over: Called with what the work has returned, before its end is told.
        """
        super().__init__(name="isotrain-work", daemon=True)
        self._job = job
        self._cast = cast
        self._context = context
        self._reporter = line.reporter
        self._hand_over = hand_over
        self._may_begin = threading.Event()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Does the job."""
        note_framework_use()
        reporter = self._reporter
        reporter.emit(Started(pid=os.getpid()))
        adapter = self._cast.host.backend(self._job.plan.backend)
        try:
            value = run_job_in_worker(
                self._job, self._cast, self._context, reporter, self._await_others
            )
            self._hand_over(value)
            reporter.emit(Finished())
        except BaseException as error:  # whatever ends it must be reported
            report_failure(error, reporter, adapter)

    def begin(self) -> None:
        """Lets it take its first step: all others are ready too."""
        self._may_begin.set()

    def _await_others(self) -> None:
        self._reporter.enter(AWAITING_OTHERS)
        while not self._may_begin.wait(_LOOK_SECONDS):
            if self._is_over.is_set():
                raise EndedError("the run has ended before its first step")

    def end(self, seconds: float) -> None:
        """Makes it end at its next call; gives up after some seconds."""
        self._is_over.set()
        self._reporter.end_soon()
        self.join(seconds)
