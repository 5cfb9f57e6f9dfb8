"""Reports from a process to its launcher: events as JSON lines over a pipe, and a shared status page."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from isotrain.core.contracts.events import (
    EpochEnded,
    Heartbeat,
    Output,
    ProcessEvent,
    Progress,
    Scalars,
    Steps,
    Warned,
)
from isotrain.core.errors import EndedError, IsotrainError
from isotrain.core.quantities import counted

HEARTBEAT_SECONDS = 0.5
BETWEEN_CALLS = "between calls"
"""Call of a process while the user's code runs."""
CLOSE = "close"
"""Call of a process that has left the training loop."""
AWAITING_OTHERS = "await the others"
"""Call of a process that is ready and waits for the others."""
WAITING_TO_JOIN = "wait to join"
"""Call of a process that waits to be let into the process group of an elastic run."""
WAITING_FOR_MEMBERS = "wait for the other members"
"""Call of a process that has left its process group of an elastic run, and waits for the next one."""
VERSION = 1

_PAGE = struct.Struct("<qd32s")
PAGE_BYTES = 1 << 18
"""Room for a membership of more than ten thousand processes; what is not used takes no memory."""
_MAY_EXIT = PAGE_BYTES - 1
"""Offset of the byte by which the launcher says that all processes have finished."""
_SAVE, _END = PAGE_BYTES - 2, PAGE_BYTES - 3
"""Offsets of the bytes by which the launcher requests a checkpoint, and an end after it."""
_ACCEPTS_REQUESTS = PAGE_BYTES - 4
"""Offset of the byte by which a process says that its loop polls for requests."""
_STOP = PAGE_BYTES - 5
"""Offset of the byte by which the launcher requests that training ends early."""
_REGROUP = PAGE_BYTES - 6
"""Offset of the byte by which the launcher requests that an elastic run forms its process group anew."""
_GENERATIONS = struct.Struct("<qqq")
"""Generation of the last membership, number of groups that have lost a member, and size of the text."""
_MEMBERSHIP = 128
"""Offset of these three; the membership's text follows."""
_POLL_SECONDS = 0.002
_RECEIVED = struct.Struct("<q")
_RECEIVED_AT = 64
"""Offset of the first step in the newest `Steps` that the launcher of an elastic run has received."""


class CheckpointRequest(NamedTuple):
    """Request of a signal or command to a running run.

    Attributes:
        save: Whether to save a checkpoint.
        end: Whether to end after it.
    """

    save: bool = False
    end: bool = False


class Status(NamedTuple):
    """Current step and call of a process.

    Attributes:
        step: Current or last step, from 0; None before the first.
        since: Start of the current call, in seconds of `time.monotonic` (shared by a host).
        call: Current call, such as `step` or `save checkpoint`; `start` at first.
    """

    step: int | None
    since: float
    call: str


def read_status(page: mmap.mmap) -> Status:
    """Reads a process's status page; works after the process has died, too."""
    content = page[: _PAGE.size]
    while content != (again := page[: _PAGE.size]):  # it was being written
        content = again
    step, since, call = _PAGE.unpack(content)
    text = call.rstrip(b"\0").decode(errors="replace")
    return Status(step - 1 if step > 0 else None, since, text or "start")


def allow_exit(page: mmap.mmap) -> None:
    """Allows a process, by its status page, to exit: all processes have finished."""
    page[_MAY_EXIT] = 1


def request_checkpoint(page: mmap.mmap, *, and_end: bool) -> None:
    """Requests a checkpoint of a process, by its status page."""
    page[_END if and_end else _SAVE] = 1


def request_stop(page: mmap.mmap) -> None:
    """Requests of a process, by its status page, that training ends early."""
    page[_STOP] = 1


def request_regroup(page: mmap.mmap) -> None:
    """Requests of a process, by its status page, that it leaves its process group before its next step."""
    page[_REGROUP] = 1


def publish_membership(page: mmap.mmap, generation: int, text: bytes) -> None:
    """Tells a process, by its status page, which process group it is to join: a `Membership` as text.

    Raises:
        IsotrainError: The text is too long for the page.
    """
    begin = _MEMBERSHIP + _GENERATIONS.size
    if begin + len(text) > _REGROUP:
        raise IsotrainError("elastic: the run has too many processes.")
    page[begin : begin + len(text)] = text
    struct.pack_into("<qq", page, _MEMBERSHIP + 8, generation, len(text))
    struct.pack_into("<q", page, _MEMBERSHIP, generation)  # last: readers wait for it


def acknowledge(page: mmap.mmap, first: int) -> None:
    """Tells a process, by its status page, with which step the newest `Steps` received began."""
    _RECEIVED.pack_into(page, _RECEIVED_AT, first)


def void_group(page: mmap.mmap, generation: int) -> None:
    """Tells a process, by its status page, that the process group of a generation has lost a member."""
    begin = _MEMBERSHIP + _GENERATIONS.size
    published, _, size = _GENERATIONS.unpack(page[_MEMBERSHIP:begin])
    page[_MEMBERSHIP:begin] = _GENERATIONS.pack(published, generation + 1, size)


def accepts_requests(page: mmap.mmap) -> bool:
    """Whether a process polls its status page for checkpoint requests."""
    return page[_ACCEPTS_REQUESTS] > 0


MOST_BYTES = 1 << 27
"""Default limit of a queue, in bytes: about two million steps."""
_STEP_BYTES = 64
_EVENT_BYTES = 200
_DROPPABLE = (Output.kind, Progress.kind, Steps.kind, Scalars.kind)

Item = TypeVar("Item")


class EventQueue(Generic[Item]):
    """Bounded queue of events in some form. Not thread-safe.

    Above the limit, steps, scalars, progress and output are dropped and counted. Of consecutive progress
    events only the newest is kept.
    """

    def __init__(self, as_item: Callable[[str], Item], most_bytes: int = MOST_BYTES) -> None:
        """Starts empty.

        Args:
            as_item: Makes an item of a text that says what was dropped.
            most_bytes: Approximate limit in bytes.
        """
        self._as_item = as_item
        self._most_bytes = most_bytes
        self._queue: deque[tuple[Item, str, int]] = deque()
        self._bytes = 0
        self._steps_dropped = 0
        self._outputs_dropped = 0
        self._scalars_dropped = 0

    @property
    def is_full(self) -> bool:
        """Whether steps, scalars, progress and output are dropped."""
        return self._bytes > self._most_bytes

    @staticmethod
    def is_droppable(kind: str) -> bool:
        """Whether a full queue drops events of a kind."""
        return kind in _DROPPABLE

    def add(self, item: Item, kind: str, fields: Mapping[str, Any]) -> None:
        """Adds an event, or drops and counts it.

        Args:
            item: The event in the form that `take` returns.
            kind: Kind of the event.
            fields: Fields of the event.
        """
        if self.is_full and self.is_droppable(kind):
            self._steps_dropped += len(fields.get("losses", ()))
            self._outputs_dropped += kind == Output.kind
            self._scalars_dropped += sum(map(len, fields.get("values", ())))
            return
        self._add_drop_notice()
        if kind == Progress.kind and self._queue and self._queue[-1][1] == kind:
            self._bytes -= self._queue.pop()[2]
        texts = (value for value in fields.values() if isinstance(value, str))
        numbers = len(fields.get("losses", ())) + sum(map(len, fields.get("values", ())))
        size = _EVENT_BYTES + sum(map(len, texts)) + _STEP_BYTES * numbers
        self._queue.append((item, kind, size))
        self._bytes += size

    def take(self) -> Item | None:
        """Removes and returns the oldest event; None if the queue is empty."""
        if not self._queue:
            self._add_drop_notice()
        if not self._queue:
            return None
        item, _, size = self._queue.popleft()
        self._bytes -= size
        return item

    def _add_drop_notice(self) -> None:
        steps, outputs, scalars = self._steps_dropped, self._outputs_dropped, self._scalars_dropped
        if steps or outputs or scalars:
            self._steps_dropped = self._outputs_dropped = self._scalars_dropped = 0
            logged = f", {scalars} logged scalars" if scalars else ""
            dropped = (
                f"{counted(steps, 'step')}{logged} and {outputs} pieces of output were dropped here"
            )
            self._queue.append((self._as_item(f"the reader was too slow: {dropped}"), "", 0))


class Reporter:
    """Reports this process's events, step and current call to the launcher, if there is one.

    Step and call are written to shared memory, the status page: that costs no system call, and the launcher
    can read them after the process was killed.
    Emitting an event never blocks: what the pipe does not take at once is sent by the reporter's thread.

    Attributes:
        step: Current step, from 0; None before the first.
        call: Current call, such as `step` or `save checkpoint`.
    """

    def __init__(
        self, rank: int = 0, descriptor: int | None = None, page: int | None = None
    ) -> None:
        """Starts the thread that sends events and heartbeats.

        Args:
            rank: Rank of this process.
            descriptor: File descriptor of the pipe for events; None without a launcher.
            page: File descriptor of the status page; None without a launcher.
        """
        self.rank = rank
        self.step: int | None = None
        self._end_requested = False
        self._kept: list[ProcessEvent] = []
        """Events of a rank above 0 of an elastic run which the launcher may not have received from rank 0."""
        self._received = 0
        self._descriptor = descriptor
        self._page = mmap.mmap(-1 if page is None else page, PAGE_BYTES)
        self._lock = threading.Lock()
        self._backlog = EventQueue(lambda text: self._stamp(Warned(text=text)).to_line())
        self._unsent = b""
        """Rest of the line that is being sent."""
        self._has_more = threading.Event()
        """Set while the thread has something to send, and at the end."""
        self.enter("start")
        if descriptor is not None:
            os.set_blocking(descriptor, False)
            threading.Thread(target=self._keep_sending, name="isotrain-events", daemon=True).start()

    def enter(self, call: str) -> None:
        """Records the start of a call on the status page.

        Raises:
            EndedError: The process was requested to end.
        """
        self.call = call
        step = 0 if self.step is None else self.step + 1
        # Not pack_into: it clears the page first, and the launcher would at times read zeros.
        self._page[: _PAGE.size] = _PAGE.pack(step, time.monotonic(), call.encode())
        if self._end_requested:
            self._end_requested = False
            raise EndedError("this process was requested to end: the run was ended")

    @contextlib.contextmanager
    def doing(self, call: str) -> Iterator[None]:
        """Context that records a call on the status page; after an error the call stays recorded."""
        self.enter(call)
        yield
        self.enter(BETWEEN_CALLS)

    def ask_to_end(self) -> None:
        """Ends the work in the main thread, which calls this: at once, or after the current step.

        Raises:
            EndedError: The process is not in a step.
        """
        self._end_requested = True
        if self.call != "step":
            self.enter(self.call)

    def end_soon(self) -> None:
        """Makes the working thread raise `EndedError` when its next call begins."""
        self._end_requested = True

    @property
    def is_end_requested(self) -> bool:
        """Whether this process was requested to end, and has not raised `EndedError` since."""
        return self._end_requested

    @property
    def checkpoint_request(self) -> CheckpointRequest:
        """Request on the status page: an end, or a checkpoint since the last read, which clears it."""
        self._page[_ACCEPTS_REQUESTS] = 1
        end, save = bool(self._page[_END]), bool(self._page[_SAVE])
        self._page[_SAVE] = 0
        return CheckpointRequest(save=save or end, end=end)

    @property
    def is_stop_requested(self) -> bool:
        """Whether the launcher has requested that training ends early."""
        return bool(self._page[_STOP])

    @property
    def is_regroup_requested(self) -> bool:
        """Whether the launcher has requested that the process group is formed anew: a process joins."""
        return bool(self._page[_REGROUP])

    def is_void(self, generation: int) -> bool:
        """Whether the process group of a generation has lost a member, as far as the launcher knows."""
        begin = _MEMBERSHIP + _GENERATIONS.size
        return int(_GENERATIONS.unpack(self._page[_MEMBERSHIP:begin])[1]) > generation

    def wait_for_membership(self, generation: int) -> bytes:
        """Blocks until the launcher has published a later process group; returns its `Membership` as text.

        Raises:
            EndedError: This process was requested to end.
        """
        begin = _MEMBERSHIP + _GENERATIONS.size
        while True:
            if self._end_requested:
                self.enter(self.call)
            published, _, size = _GENERATIONS.unpack(self._page[_MEMBERSHIP:begin])
            if published > generation:
                self._page[_REGROUP] = 0
                return self._page[begin : begin + size]
            time.sleep(_POLL_SECONDS)

    @property
    def has_listener(self) -> bool:
        """Whether there is a launcher to report to."""
        return self._descriptor is not None

    def emit(self, event: ProcessEvent) -> None:
        """Sends an event, with this process's rank, the time, step and call."""
        if self._descriptor is None:
            return
        stamped = self._stamp(event)
        with self._lock:
            self._backlog.add(stamped.to_line(), stamped.kind, vars(stamped))
            if not self._send():
                self._has_more.set()

    def report(self, event: ProcessEvent) -> None:
        """Sends an event of rank 0. Other ranks, of elastic runs, keep it: rank 0 may be lost."""
        if self.rank == 0:
            self.emit(event)
            return
        self._kept.append(event)
        received = _RECEIVED.unpack_from(self._page, _RECEIVED_AT)[0]
        if received != self._received:
            self._received = received
            self._kept = [each for each in self._kept if not _is_before(each, received)]

    def drop_kept(self, done: int) -> None:
        """Drops what was kept of the steps after the first `done`, which are taken again."""
        self._received = _RECEIVED.unpack_from(self._page, _RECEIVED_AT)[0]  # of the steps before
        self._kept = [kept for each in self._kept if (kept := _until(each, done)) is not None]

    def send_kept(self, steps: int, epochs: int, scalars: int) -> int:
        """Sends what an earlier rank 0 has not reported, once this process is rank 0.

        Args:
            steps: Number of steps that were reported.
            epochs: Number of epochs whose end was reported.
            scalars: Number of steps whose logged scalars were reported.

        Returns:
            Number of steps that are reported now.
        """
        for event in self._kept:
            if isinstance(event, Steps) and event.first + len(event.losses) > steps:
                new = max(0, steps - event.first)
                losses, rates = event.losses[new:], event.learning_rates[new:]
                self.emit(Steps(first=event.first + new, losses=losses, learning_rates=rates))
                steps = event.first + len(event.losses)
            elif isinstance(event, EpochEnded) and event.epoch >= epochs:
                self.emit(event)
            elif isinstance(event, Scalars):
                rows = zip(event.steps, event.values, strict=True)
                if new_rows := [row for row in rows if row[0] >= scalars]:
                    new_steps, values = zip(*new_rows, strict=True)
                    self.emit(Scalars(steps=new_steps, values=values))
        self._kept.clear()
        return steps

    def _stamp(self, event: ProcessEvent) -> ProcessEvent:
        return replace(event, rank=self.rank, time=time.time(), step=self.step, call=self.call)

    def _send(self) -> bool:
        """Writes what the pipe takes without blocking; returns whether that was all. Called with the lock."""
        while self._descriptor is not None:
            self._unsent = self._unsent or self._backlog.take() or b""
            if not self._unsent:
                break
            try:
                self._unsent = self._unsent[os.write(self._descriptor, self._unsent) :]
            except BlockingIOError:
                return False
        return True

    def flush(self) -> None:
        """Blocks until all events are sent."""
        while (descriptor := self._descriptor) is not None:
            with self._lock:
                if self._send():
                    return
            _wait_writable(descriptor)

    def warn(self, text: str) -> None:
        """Sends a warning to the launcher, or issues it in this process without one."""
        if self.has_listener:
            self.emit(Warned(text=text))
        else:
            warnings.warn(text, stacklevel=2)

    def close(self) -> None:
        """Stops reporting."""
        with self._lock:
            self._descriptor = None
        self._has_more.set()

    def wait_for_others(self) -> None:
        """Blocks until the launcher says that all processes with a session have finished.

        A process that exits while a peer still receives its last message would break that connection.
        """
        while self._descriptor is not None and not self._page[_MAY_EXIT]:
            time.sleep(_POLL_SECONDS)

    def _keep_sending(self) -> None:
        """Thread: sends queued events, and a heartbeat when there are none."""
        try:
            while self._descriptor is not None:
                if not self._has_more.wait(HEARTBEAT_SECONDS):
                    self.emit(Heartbeat())
                    continue
                self._has_more.clear()
                self.flush()
        except OSError:
            kill_process_group()


def _is_before(event: ProcessEvent, first: int) -> bool:
    """Whether rank 0 has sent an event before a `Steps` that begins with the step `first`.

    It sends the end of an epoch before the next step; scalars may be logged until the next step is reported.
    """
    if isinstance(event, Steps):
        return event.first + len(event.losses) <= first
    if isinstance(event, EpochEnded):
        return event.done <= first
    return isinstance(event, Scalars) and max(event.steps) + 1 < first


def _until(event: ProcessEvent, done: int) -> ProcessEvent | None:
    """The part of an event of rank 0 that is of the first `done` steps; None if there is none."""
    if isinstance(event, Steps):
        count = done - event.first
        losses, rates = event.losses[:count], event.learning_rates[:count]
        return replace(event, losses=losses, learning_rates=rates) if count > 0 else None
    if isinstance(event, EpochEnded):
        return event if event.done <= done else None
    if isinstance(event, Scalars):
        rows = [row for row in zip(event.steps, event.values, strict=True) if row[0] < done]
        if not rows:
            return None
        steps, values = zip(*rows, strict=True)
        return replace(event, steps=steps, values=values)
    return event


def _wait_writable(descriptor: int) -> None:
    """Blocks until a pipe is writable or broken, at most for a heartbeat's interval."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll(HEARTBEAT_SECONDS * 1000)


def kill_process_group() -> None:
    """Kills this process and those it started, because its launcher is gone."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
