"""The program of every rank but 0 in a run that was started from outside: works, reports to rank 0."""

from __future__ import annotations

import codecs
import contextlib
import faulthandler
import os
import selectors
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.core.contracts.events import Failed, Heartbeat
from isotrain.core.contracts.job import Job
from isotrain.core.contracts.membership import Membership
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.contracts.reporter import Status
from isotrain.core.errors import IsotrainError, PeerLostError
from isotrain.core.launching.supervision.checkpoint_on_signal import checkpoint_on_signals
from isotrain.core.launching.supervision.failure_diagnosis import whereabouts
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.rendezvous.crash_output import (
    Dismiss,
    faulthandler_enabled,
    output_tail_on_crash,
)
from isotrain.core.rendezvous.heartbeat import HeartbeatInterval, sigterm_as_exception
from isotrain.core.rendezvous.local_reporter import LocalReporter
from isotrain.core.rendezvous.rendezvous import (
    RendezvousClient,
    leave_rank_zero,
    remote_error,
)
from isotrain.core.rendezvous.state_exchange import StateExchange
from isotrain.core.rendezvous.worker_group import WorkerGroup
from isotrain.core.rendezvous.worker_thread import END_SECONDS, WorkerThread
from isotrain.core.system.process import environ_set, exit_after_failure
from isotrain.core.system.standard_streams import line_buffered
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.codec import decode_value, encode_value

_POLL_SECONDS = 0.1
_MAX_OUTPUT_BYTES = 1 << 16
_HEARTBEAT = f'{{"event": "{Heartbeat.kind}"'.encode()
_PAUSE_SECONDS = 1.0
_STDERR = 2
"""The file descriptor, even if `sys.stderr` is something else."""


class OutputTail:
    """Reads a growing file of output, as `tail -f` does.

    Attributes:
        dismiss: Call it before this process ends on purpose: the tail is not shown then.
    """

    def __init__(self, descriptor: int, dismiss: Dismiss) -> None:
        self.dismiss = dismiss
        self._descriptor = descriptor
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str:
        """The next new text, at most 64 KiB; empty: there is none."""
        chunk = os.pread(self._descriptor, _MAX_OUTPUT_BYTES, self._position)
        self._position += len(chunk)
        return self._decoder.decode(chunk)


class RankRelay:
    """Sends events, output and status of this process to rank 0, and carries out rank 0's commands."""

    def __init__(
        self,
        channel: Channel,
        reporter: LocalReporter,
        worker: WorkerThread,
        exchange: StateExchange,
        silence: float,
        processes: int,
        on_answer: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Starts with rank 0 alive; it counts as lost after `silence` seconds without a message.

        `on_answer` gets what rank 0 answers to a process that joins.
        """
        self._on_answer = on_answer
        self._is_member = False
        self._interval = HeartbeatInterval.of(processes, silence)
        self._sent_status: Status | None = None
        self._sent_at = 0.0
        self._channel = channel
        self._reporter = reporter
        self._worker = worker
        self._exchange = exchange
        self._silence = silence
        self._rank_zero = Status(None, 0.0, "start")
        self._received_at = time.monotonic()
        self._received = 0

    def run(self, tail: OutputTail) -> list[Any]:
        """Relays until rank 0 ends the run; `tail` has this process's output.

        Returns:
            The return values of all processes, by rank.

        Raises:
            IsotrainError: The run has failed, as rank 0 reports it; or rank 0 is lost.
        """
        with selectors.DefaultSelector() as selector:
            for source in (self._reporter.events, self._channel):
                selector.register(source, selectors.EVENT_READ)
            while True:
                began = time.monotonic()
                selector.select(_POLL_SECONDS)
                self._discount_pause(time.monotonic() - began - _POLL_SECONDS)
                self._forward(tail)
                ended, values = self._handle_commands(tail)
                if ended:
                    return values

    def _discount_pause(self, pause: float) -> None:
        """Does not count time in which this process was suspended as silence of rank 0."""
        if pause > _PAUSE_SECONDS:
            self._received_at += pause

    def _forward(self, tail: OutputTail) -> None:
        lines = self._reporter.read_lines() or ()  # first: output before an event is sent before it
        while text := tail.read():
            self._channel.send({"output": text})
        for line in lines:
            if not line.startswith(_HEARTBEAT):  # any message is a heartbeat
                self._channel.send({"event": line.decode(), **self._status()})
        has_changed = self._sent_status != self._reporter.status
        interval = self._interval.min_seconds if has_changed else self._interval.max_seconds
        if time.monotonic() - self._sent_at > interval:
            self._channel.send(self._status())

    def _status(self) -> dict[str, Any]:
        self._sent_status, self._sent_at = self._reporter.status, time.monotonic()
        return status_message(self._reporter)

    def _handle_commands(self, tail: OutputTail) -> tuple[bool, list[Any]]:
        """Carries out rank 0's commands; returns whether the run is over, and the return values then."""
        messages = self._channel.read()
        if messages is None:
            raise self._rank_zero_lost("is gone: its connection was closed")
        if self._channel.received != self._received:
            self._received, self._received_at = self._channel.received, time.monotonic()
        for message, arrays in messages:
            if "error" in message:  # the run has failed, or rank 0 has, before or after it
                raise remote_error(message)
            command = message["do"]
            if command == "leave":
                values: list[Any] = decode_value(message["returned"], arrays)
                return True, values
            if command == "state":
                self._exchange.receive(message, arrays)
            self._execute(command, message, tail)
        silent = time.monotonic() - self._received_at
        if silent > self._silence:
            raise self._rank_zero_lost(
                f"fell silent: nothing was received from it for {silent:.0f} s"
            )
        return False, []

    def _execute(self, command: str, message: Any, tail: OutputTail) -> None:
        if command == "beat":
            self._rank_zero = Status(message["step"], 0.0, message["call"])
        elif command == "begin":
            self._worker.begin()
        elif command == "stacks":
            faulthandler.dump_traceback(_STDERR, all_threads=True)
        elif command == "acknowledge":
            self._reporter.acknowledge(message["first"])
        elif command == "regroup":
            self._reporter.request_regroup()
        elif command == "answer":
            if self._on_answer is not None:
                self._on_answer(message["answer"])
        elif command == "void":
            self._reporter.void_group(message["generation"])
        elif command == "form":
            self._is_member = True
            self._reporter.publish_membership(Membership.from_bytes(message["membership"]))
        elif command == "end":
            tail.dismiss()
            self._leave()

    def _leave(self) -> None:
        """Ends this process, which rank 0 goes on without.

        Raises:
            IsotrainError: It is one that joins, or has joined.
        """
        if self._on_answer is None:
            os._exit(0)  # the run goes on; a launcher would end it if a process failed
        if self._is_member:
            raise IsotrainError(
                "rank 0 has taken this process for lost: the run goes on without it."
            )
        raise IsotrainError("the run has ended before this process joined it.")

    def _rank_zero_lost(self, how: str) -> PeerLostError:
        self._channel.shutdown()  # rank 0 waits for no message any more
        local = whereabouts(self._reporter.status)
        return PeerLostError(
            f"rank 0 {how}. It was {whereabouts(self._rank_zero)}, and this process {local}."
        )


def run_nonzero_rank(group: WorkerGroup, job: Job) -> tuple[list[Any], str]:
    """Runs this rank's part of a job, which was made in the same way as on rank 0.

    Returns:
        The return values of all processes, by rank; and the run directory on rank 0's host.

    Raises:
        IsotrainError: The run has failed; says how.
    """
    rendezvous = group.rendezvous
    assert isinstance(rendezvous, RendezvousClient)
    # a local folder, in case rank 0's run directory is not visible here
    with tempfile.TemporaryDirectory(prefix="isotrain-joined-") as folder:
        with rendezvous.broadcasting_errors():
            assignment = group.exchange_plan(job, Path(folder))
        key = rendezvous.key.derive("parameter-server run")
        job = replace(job, key=key, resume=assignment.resume, may_stop=assignment.may_stop)
        values = work_for_rank_zero(
            job, group.resolved_spec, assignment.context, rendezvous.channel
        )
    return values, str(assignment.directory)


def work_for_rank_zero(
    job: Job,
    resolved_spec: ResolvedSpec,
    context: ProcessContext,
    channel: Channel,
    on_answer: Callable[[Mapping[str, Any]], None] | None = None,
) -> list[Any]:
    """Runs this process's part of a job, supervised by rank 0; closes the channel.

    A signal that ends a process of the start ends the run. One that ends a process that has joined does not:
    the others go on without it.

    Args:
        job: The job.
        resolved_spec: The job's spec with its plugin references resolved.
        context: Process context of this process.
        channel: Channel to rank 0.
        on_answer: Called with what rank 0 answers to a process that joins.

    Returns:
        The return values of all processes, by rank.

    Raises:
        IsotrainError: The run has failed; says how.
    """
    reporter = LocalReporter(context.rank)

    def send_returned(value: Any) -> None:
        plain, arrays = encode_value(value)
        channel.send({"returned": plain}, arrays)

    exchange = StateExchange(context.rank, {0: channel})
    worker = WorkerThread(job, resolved_spec, context, reporter, send_returned, exchange)
    silence, processes = job.plan.timeouts["silence"], len(job.plan.processes)
    relay = RankRelay(channel, reporter, worker, exchange, silence, processes, on_answer)
    with contextlib.ExitStack() as stack:
        stack.callback(reporter.close)
        stack.enter_context(sigterm_as_exception())
        if job.spec.checkpoint is not None and not context.joins:
            stack.enter_context(checkpoint_on_signals([reporter]))
        stack.enter_context(environ_set(job.plan.environment_variables))
        tail = stack.enter_context(output_to_file())
        worker.start()
        try:
            values = relay.run(tail)
        except BaseException as error:
            if not isinstance(error, IsotrainError) and not context.joins:
                _send_failure(error, channel, reporter)
            worker.end(END_SECONDS)
            exit_after_failure(worker)
            leave_rank_zero(channel)
            raise
        worker.end(END_SECONDS)  # it may wait for members that have finished
        leave_rank_zero(channel)
    return values


def status_message(reporter: LocalReporter) -> dict[str, Any]:
    """Status of this process with the time on its clock, for rank 0, whose clock may differ."""
    step, since, call = reporter.status
    return {"status": [step, time.monotonic() - since, call], "clock": time.time()}


def _send_failure(error: BaseException, channel: Channel, reporter: LocalReporter) -> None:
    """Reports to rank 0 an error outside the worker thread, such as a signal."""
    error_type = type(error).__name__
    text = "".join(traceback.format_exception(error))
    step, _, call = reporter.status
    failed = Failed(
        rank=reporter.reporter.rank,
        time=time.time(),
        step=step,
        call=call,
        error=error_type,
        message=f"{error_type}: {error}".strip(": "),
        traceback=text,
        is_peer_error=False,
    )
    channel.send({"event": failed.to_line().decode().strip(), **status_message(reporter)})
    sys.stderr.flush()


@contextlib.contextmanager
def output_to_file() -> Iterator[OutputTail]:
    """Context in which file descriptors 1 and 2 go to a file, line by line, native output included.

    If this process dies, the tail of the file goes to the original standard error.
    """
    with tempfile.TemporaryFile() as log, line_buffered():
        _flush()
        originals = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        try:
            with (
                output_tail_on_crash(log.fileno(), originals[1]) as dismiss,
                faulthandler_enabled(),
            ):
                yield OutputTail(log.fileno(), dismiss)
        finally:
            _flush()
            for number, original in zip((1, 2), originals, strict=True):
                os.dup2(original, number)
                os.close(original)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
