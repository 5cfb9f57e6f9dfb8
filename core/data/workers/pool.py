"""A pool of worker processes that make the local batches of one source ahead of their consumer."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from isotrain.core.data.arrays import InputsAndTargets
from isotrain.core.data.fetch import BatchPositions, Fetcher
from isotrain.core.data.processes.channel import ChannelClosedError, Message
from isotrain.core.data.processes.child_process import VARIABLES, ChildProcess, close_all
from isotrain.core.data.pytree import decode_tree
from isotrain.core.data.refusals import RefusedError
from isotrain.core.data.worker_settings import WorkerSettings
from isotrain.core.data.workers.worker import WorkerTask, work
from isotrain.core.errors import DataError, error_named, first_of
from isotrain.core.system.pickling import Payload
from isotrain.core.system.process import poll_readable

_MAIN = "isotrain.core.data.workers.worker:main"
_MOST_LISTED = 8
_RECEIVERS = "the worker processes that load data"
_PICKLE_ADVICE = "when the first sample is made, or set loader: {start: fork}"


class WorkerTraceback(Exception):
    """The traceback of a worker, as the cause of the error that is raised here."""

    def __str__(self) -> str:
        """The traceback on lines of its own."""
        return f"in a worker process\n{self.args[0]}"


@dataclass
class _Request:
    """A local batch to be made by a worker: in the end, its arrays or an error."""

    positions: BatchPositions
    worker: _Worker
    parts: InputsAndTargets | None = None
    error: Exception | None = None


@dataclass
class _Worker:
    """A worker process, and the requests that it has not answered, in order."""

    index: int
    child: ChildProcess
    pending: deque[_Request] = field(default_factory=deque)
    error: Exception | None = None


class WorkerPool:
    """Worker processes for one source; they start with the first local batch, and stay until `close`."""

    def __init__(self, fetcher: Fetcher, settings: WorkerSettings) -> None:
        """Keeps what is needed to start the processes.

        Args:
            fetcher: Makes local batches, in each worker.
            settings: Number of workers, and how they start.
        """
        self._transformed = fetcher.transform
        self._settings = settings
        on_host = fetcher.transform.on_host()
        task = replace(fetcher, transform=on_host, restores_generators=False)
        self._task = WorkerTask(task, settings)
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    def fetch(self, positions: Iterator[BatchPositions]) -> Iterator[InputsAndTargets]:
        """Yields local batches as `Fetcher.fetch` makes them, in order, with arrays in shared memory.

        Raises:
            DataError: A worker has raised, has ended, or takes too long; when its local batch is due.
        """
        requests: deque[_Request] = deque()
        most = self._settings.count * self._settings.prefetch
        while True:
            while len(requests) < most and (each := next(positions, None)) is not None:
                requests.append(self._submit(each))
            if not requests:
                return
            yield self._result(requests.popleft())

    def close(self) -> None:
        """Ends the processes; others start when local batches are requested again."""
        workers, self._workers = self._workers, []
        close_all(worker.child for worker in workers)

    def _submit(self, positions: BatchPositions) -> _Request:
        """Sends a request to the worker with the fewest."""
        with self._lock:
            if not self._workers:
                self._start()
            worker = min(self._workers, key=lambda each: len(each.pending))
            request = _Request(positions, worker, error=worker.error)
            if worker.error is None:
                worker.pending.append(request)
                header = {
                    "epoch": positions.epoch,
                    "step": positions.step,
                    "checks_transform": self._transformed.takes_check(len(positions.local)),
                }
                with contextlib.suppress(ChannelClosedError):  # seen when its answers are read
                    worker.child.channel.send(header, [positions.local, positions.all])
            return request

    def _start(self) -> None:
        count = self._settings.count
        if self._settings.start == "fork":
            for index in range(count):
                child = ChildProcess.fork(functools.partial(work, index=index, task=self._task))
                self._workers.append(_Worker(index, child))
            return
        source = self._task.fetcher.source
        # what cannot be pickled is looked for by these names
        value = {"data": getattr(source, "data", source), "task": self._task}
        with contextlib.closing(Payload(value, None, _RECEIVERS, _PICKLE_ADVICE)) as payload:
            start = payload.append_stream()
            for index in range(count):
                arguments = (index, payload.descriptor, start)
                child = ChildProcess.spawn(_MAIN, VARIABLES, arguments, [payload.descriptor])
                self._workers.append(_Worker(index, child))

    def _result(self, request: _Request) -> InputsAndTargets:
        """Waits for a local batch: the oldest that its worker owes."""
        deadline = time.monotonic() + self._settings.timeout
        while request.parts is None and request.error is None:
            with self._lock:
                if request.parts is None and request.error is None:
                    self._receive(request.worker, max(0.0, deadline - time.monotonic()))
        if request.error is not None:
            raise request.error
        assert request.parts is not None
        return request.parts

    def _receive(self, awaited: _Worker, seconds: float) -> None:
        """Waits for answers of any workers; those of one arrive in order.

        The awaited one is lost after so many seconds, however much the others answer: the launcher's own
        time-out of the same call goes on, and knows less of what hangs.
        """
        by_descriptor = {w.child.channel.fileno(): w for w in self._workers if w.error is None}
        ready = poll_readable(by_descriptor, seconds)
        for descriptor in ready:
            worker = by_descriptor[descriptor]
            try:
                while (message := worker.child.channel.receive(0)) is not None:
                    self._answered(worker, message)
            except ChannelClosedError:
                self._lose(worker, worker.child.describe_end())
        if not ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(awaited.child.pid, signal.SIGUSR1)
            end = f"has not answered for {self._settings.timeout:g} s (0.9 of timeouts.progress)"
            self._lose(awaited, f"{end}; its stack is in the log of this rank")

    def _answered(self, worker: _Worker, message: Message) -> None:
        description = message.header.get("error")
        if description is None:
            worker.pending.popleft().parts = decode_tree(message.header["tree"], message.arrays)
            if (warning := message.header["warning"]) is not None:
                warnings.warn(warning, stacklevel=2)
        elif description["is_final"]:
            self._lose(worker, f"raised {description['text']}", description["traceback"])
        else:
            request = worker.pending.popleft()
            request.error = self._error_of(worker, request, description)

    def _lose(self, worker: _Worker, end: str, traceback: str | None = None) -> None:
        """Fails all requests of a worker, present and later ones, with how it ended."""
        error = DataError(self._text(worker, end, next(iter(worker.pending), None)))
        error.__cause__ = None if traceback is None else WorkerTraceback(traceback)
        worker.error = error
        while worker.pending:
            worker.pending.popleft().error = error

    def _error_of(
        self, worker: _Worker, request: _Request, description: dict[str, Any]
    ) -> Exception:
        """An error that a worker has raised."""
        error: Exception
        if description["refusal"] is not None:
            error = RefusedError(*description["refusal"])
        elif description["is_ours"]:
            error = error_named(description["class"], description["text"], DataError)
        else:
            error = DataError(self._text(worker, f"raised {description['text']}", request))
        error.__cause__ = WorkerTraceback(description["traceback"])
        return error

    def _text(self, worker: _Worker, end: str, request: _Request | None) -> str:
        name = f"worker process {worker.index} of {self._settings.count} (pid {worker.child.pid})"
        if request is None:
            return f"data: {name} {end}"
        listed = first_of([str(each) for each in request.positions.local], _MOST_LISTED)
        return (
            f"data: {name} {end}; it was making samples {listed} of step {request.positions.step}"
        )
