"""What a process of a run tells the one that started it: JSON lines over a pipe, and a status page."""

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
    Heartbeat,
    Output,
    ProcessEvent,
    Progress,
    Steps,
    Warned,
)
from isotrain.core.errors import EndedError

HEARTBEAT_SECONDS = 0.5
BETWEEN_CALLS = "between calls"
"""What a process does while the person's own code runs."""
CLOSE = "close"
"""What a process does that has left its loop."""
AWAITING_OTHERS = "await the others"
"""What a process does that is ready before the others are."""
VERSION = 1

_PAGE = struct.Struct("<qd32s")
PAGE_BYTES = mmap.PAGESIZE
_MAY_LEAVE = PAGE_BYTES - 1
"""Where on the page the launcher tells that all have finished."""
_SAVE, _END = PAGE_BYTES - 2, PAGE_BYTES - 3
"""Where on the page the launcher tells that somebody asked for a checkpoint, and for an end after it."""
_HEEDS_WISHES = PAGE_BYTES - 4
"""Where on the page a process tells that its loop looks for wishes."""
_LOOK_SECONDS = 0.002


class CheckpointRequest(NamedTuple):
    """What somebody outside asks of a run.

    Attributes:
        save: To save a checkpoint.
        end: To end after that.
    """

    save: bool = False
    end: bool = False


class Status(NamedTuple):
    """Where a process is.

    Attributes:
        step: The step it is at or was at last, from 0; None before the first.
        since: When it began what it is doing (`time.monotonic`, which all processes of a host share).
        call: What it is doing, in a word or two; "start" until it says otherwise.
    """

    step: int | None
    since: float
    call: str


def read_status(page: mmap.mmap) -> Status:
    """Reads a process's status page, whether the process still lives or not."""
    content = page[: _PAGE.size]
    while content != (again := page[: _PAGE.size]):  # it was being written
        content = again
    step, since, call = _PAGE.unpack(content)
    text = call.rstrip(b"\0").decode(errors="replace")
    return Status(step - 1 if step > 0 else None, since, text or "start")


def allow_exit(page: mmap.mmap) -> None:
    """Tells a process, on its status page, that it may end: all have finished."""
    page[_MAY_LEAVE] = 1


def request_checkpoint(page: mmap.mmap, *, and_end: bool) -> None:
    """Tells a process, on its status page, that a checkpoint is wanted."""
    page[_END if and_end else _SAVE] = 1


def accepts_requests(page: mmap.mmap) -> bool:
    """Whether a process looks for such wishes."""
    return page[_HEEDS_WISHES] > 0


MOST_BYTES = 1 << 27
"""That wait: about two million steps."""
_STEP_BYTES = 64
_EVENT_BYTES = 200
_MAY_BE_LEFT_OUT = (Output.kind, Progress.kind, Steps.kind)

Item = TypeVar("Item")


class EventQueue(Generic[Item]):
    """A queue of events in some form; of progress in a row only the newest is kept. Not thread-safe."""

    def __init__(self, as_item: Callable[[str], Item], most_bytes: int = MOST_BYTES) -> None:
        """Begins empty.

        Args:
            as_item: Makes an event of a text that says what was left out.
            most_bytes: Roughly; steps, progress and output beyond that are left out.
        """
        self._as_item = as_item
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[Item, str, int]] = deque()
        self._bytes = 0
        self._steps_left_out = 0
        self._outputs_left_out = 0

    @property
    def is_full(self) -> bool:
        """Whether steps, progress and output are left out."""
        return self._bytes > self._most_bytes

    @staticmethod
    def is_droppable(kind: str) -> bool:
        """Whether events of a kind are left out where too much waits already."""
        return kind in _MAY_BE_LEFT_OUT

    def add(self, item: Item, kind: str, fields: Mapping[str, Any]) -> None:
        """Adds an event, or counts what is left out with it.

        Args:
            item: The event, as `take` gives it.
            kind: The event's kind.
            fields: The event's fields.
        """
        if self.is_full and self.is_droppable(kind):
            self._steps_left_out += len(fields.get("losses", ()))
            self._outputs_left_out += kind == Output.kind
            return
        self._tell_what_was_left_out()
        if kind == Progress.kind and self._waiting and self._waiting[-1][1] == kind:
            self._bytes -= self._waiting.pop()[2]
        texts = (value for value in fields.values() if isinstance(value, str))
        size = _EVENT_BYTES + sum(map(len, texts)) + _STEP_BYTES * len(fields.get("losses", ()))
        self._waiting.append((item, kind, size))
        self._bytes += size

    def take(self) -> Item | None:
        """Removes and returns the oldest event; None where none waits."""
        if not self._waiting:
            self._tell_what_was_left_out()
        if not self._waiting:
            return None
        item, _, size = self._waiting.popleft()
        self._bytes -= size
        return item

    def _tell_what_was_left_out(self) -> None:
        steps, outputs = self._steps_left_out, self._outputs_left_out
        if steps or outputs:
            self._steps_left_out = self._outputs_left_out = 0
            left_out = f"{steps} steps and {outputs} pieces of output were left out here"
            text = f"nobody read for too long: {left_out}"
            self._waiting.append((self._as_item(text), "", 0))


class Reporter:
    """Tells the launcher about this process; without a launcher it keeps quiet.

    Step and call are written to a page of memory that the launcher shares, so that they are known to
    the very step when this process is killed, and cost no system call.
    Who tells something never waits: what the pipe does not take at once, because its reader is stopped or
    held, is sent by a thread of the reporter's.

    Attributes:
        step: The step this process is at; None before the first.
        call: What it is doing, in a word or two.
    """

    def __init__(
        self, rank: int = 0, descriptor: int | None = None, page: int | None = None
    ) -> None:
        """Starts the heartbeat.

        Args:
            rank: Of this process.
            descriptor: Where to write events; None: nobody listens.
            page: Descriptor of the status page; None: nobody reads it.
        """
        self.rank = rank
        self.step: int | None = None
        self._is_asked_to_end = False
        self._descriptor = descriptor
        self._page = mmap.mmap(-1 if page is None else page, PAGE_BYTES)
        self._lock = threading.Lock()
        self._backlog = EventQueue(lambda text: self._told(Warned(text=text)).to_line())
        self._unsent = b""
        """Of the line that is being sent."""
        self._has_more = threading.Event()
        """Set while some of it has to be sent by the thread, and at the end."""
        self.enter("start")
        if descriptor is not None:
            os.set_blocking(descriptor, False)
            threading.Thread(target=self._keep_sending, name="isotrain-events", daemon=True).start()

    def enter(self, call: str) -> None:
        """Notes that another call begins."""
        self.call = call
        step = 0 if self.step is None else self.step + 1
        # Not pack_into: it clears the page first, and the launcher would at times read zeros.
        self._page[: _PAGE.size] = _PAGE.pack(step, time.monotonic(), call.encode())
        if self._is_asked_to_end:
            self._is_asked_to_end = False
            raise EndedError("this process was asked to end: the run was ended")

    @contextlib.contextmanager
    def doing(self, call: str) -> Iterator[None]:
        """Notes that a call begins, and that it has ended; after an error it stays the one it was in."""
        self.enter(call)
        yield
        self.enter(BETWEEN_CALLS)

    def ask_to_end(self) -> None:
        """Makes the main thread, which calls this, raise: at once, or at the end of the step it is in.

        Raises:
            EndedError: It is in no step.
        """
        self._is_asked_to_end = True
        if self.call != "step":
            self.enter(self.call)

    def end_soon(self) -> None:
        """Makes the thread that does the work raise when its next call begins."""
        self._is_asked_to_end = True

    @property
    def checkpoint_request(self) -> CheckpointRequest:
        """What was asked of this process's run: an end, or a checkpoint since this was looked at last."""
        self._page[_HEEDS_WISHES] = 1
        end, save = bool(self._page[_END]), bool(self._page[_SAVE])
        self._page[_SAVE] = 0
        return CheckpointRequest(save=save or end, end=end)

    @property
    def has_listener(self) -> bool:
        """Whether anybody listens."""
        return self._descriptor is not None

    def emit(self, event: ProcessEvent) -> None:
        """Sends an event, and with it who tells it, when, and at which step in which call."""
        if self._descriptor is None:
            return
        told = self._told(event)
        with self._lock:
            self._backlog.add(told.to_line(), told.kind, vars(told))
            if not self._send():
                self._has_more.set()

    def _told(self, event: ProcessEvent) -> ProcessEvent:
        return replace(event, rank=self.rank, time=time.time(), step=self.step, call=self.call)

    def _send(self) -> bool:
        """Writes what the pipe takes at once; whether that was all. Called with the lock."""
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
        """Returns once all that was told is sent, however long the reader takes."""
        while (descriptor := self._descriptor) is not None:
            with self._lock:
                if self._send():
                    return
            _await_room(descriptor)

    def warn(self, text: str) -> None:
        """Tells the launcher, or where there is none the person whose program this is."""
        if self.has_listener:
            self.emit(Warned(text=text))
        else:
            warnings.warn(text, stacklevel=2)

    def close(self) -> None:
        """Tells nothing any more, of what goes on in this process."""
        with self._lock:
            self._descriptor = None
        self._has_more.set()

    def wait_for_others(self) -> None:
        """Returns once all processes with a session have finished; their launcher watches those it waits for.

        A process that ended while another still received the last of its messages would break its connection.
        """
        while self._descriptor is not None and not self._page[_MAY_LEAVE]:
            time.sleep(_LOOK_SECONDS)

    def _keep_sending(self) -> None:
        """Sends what `emit` has left, and heartbeats between."""
        try:
            while self._descriptor is not None:
                if not self._has_more.wait(HEARTBEAT_SECONDS):
                    self.emit(Heartbeat())
                    continue
                self._has_more.clear()
                self.flush()
        except OSError:
            kill_process_group()


def _await_room(descriptor: int) -> None:
    """Returns once a pipe takes more or nobody reads it any more, and after a heartbeat's time."""
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    room.poll(HEARTBEAT_SECONDS * 1000)


def kill_process_group() -> None:
    """Ends this process and all that it started: whoever started the run is gone."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
