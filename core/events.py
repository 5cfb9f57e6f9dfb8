"""What a process of a run tells the one that started it: JSON lines over a pipe."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

DESCRIPTOR_VARIABLE = "ISOTRAIN_EVENTS"
HEARTBEAT_SECONDS = 0.5
VERSION = 1


class Reporter:
    """Tells the launcher about this process; without a launcher it keeps quiet.

    The current step and call are plain attributes, so that keeping them up to date costs next to
    nothing; a thread reports them at every heartbeat.

    Attributes:
        step: The step this process is at; None before the first.
        call: What it is doing, in one word.
    """

    def __init__(self, rank: int = 0, descriptor: int | None = None) -> None:
        self.rank = rank
        self.step: int | None = None
        self.call = "start"
        self._since = time.monotonic()
        self._descriptor = descriptor
        self._lock = threading.Lock()
        if descriptor is not None:
            threading.Thread(target=self._beat, name="isotrain-heartbeat", daemon=True).start()

    def enter(self, call: str) -> None:
        """Notes that another call begins."""
        self.call = call
        self._since = time.monotonic()

    def emit(self, kind: str, **facts: Any) -> None:
        """Sends one event; every event has `event`, `rank`, `time`, `step` and `call`."""
        if self._descriptor is None:
            return
        event = {
            "event": kind,
            "rank": self.rank,
            "time": time.time(),
            "step": self.step,
            "call": self.call,
            **facts,
        }
        line = json.dumps(event, default=str).encode() + b"\n"
        with self._lock:
            _write_all(self._descriptor, line)

    def _beat(self) -> None:
        try:
            while True:
                self.emit("heartbeat", in_call=time.monotonic() - self._since)
                time.sleep(HEARTBEAT_SECONDS)
        except OSError:
            end_own_group()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def end_own_group() -> None:
    """Ends this process and all that it started: whoever started the run is gone."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
