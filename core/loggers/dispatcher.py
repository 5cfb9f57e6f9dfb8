"""Who is told how a run goes: the plugins' event hooks, and the run's loggers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from isotrain.core.contracts.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    Ready,
    Steps,
)
from isotrain.core.contracts.logger import Logger
from isotrain.core.loggers import writer_thread
from isotrain.core.loggers.writer_thread import WriterThread
from isotrain.core.plugins.manager import PluginManager


class EventDispatcher:
    """Tells event hooks and loggers about one run; what they do wrong never ends it.

    Entered when the run's processes are about to start; left, it tells how the run ended.

    Attributes:
        result: To be set when there is one: what the result file holds.
    """

    def __init__(
        self,
        host: PluginManager,
        loggers: Sequence[Logger],
        plan: Mapping[str, Any],
        directory: Path,
    ) -> None:
        self._host = host
        self._writers = [WriterThread(logger) for logger in loggers]
        self._plan = plan
        self._directory = directory
        self._began = False
        self._rewound: int | None = None
        self.result: Mapping[str, Any] | None = None

    def __enter__(self) -> Self:
        self._tell("isotrain_run_started", plan=self._plan)
        return self

    def dispatch(self, event: Event) -> None:
        """Passes on what an event of a process tells."""
        if isinstance(event, Ready) and event.plan is not None:
            self._begin(event.plan)
        elif isinstance(event, Steps):
            facts = event.first, event.losses, event.learning_rates
            self._write("steps_done", *facts, steps=len(event.losses))
        elif isinstance(event, EpochEnded):
            epoch, done, metrics = event.epoch, event.done, event.metrics
            self._tell("isotrain_epoch_ended", epoch=epoch, step=done, metrics=metrics)
            self._write("epoch_ended", epoch, done, metrics, steps=1)
        elif isinstance(event, CheckpointSaved):
            step, location = event.done, event.location
            self._tell("isotrain_checkpoint_saved", step=step, location=location)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._begin(self._plan)
        if error is not None:
            message = str(error) or type(error).__name__
            self._write("failed", message)
            self._tell("isotrain_run_failed", message=message)
        else:
            self._write("finished", self.result)
            if self.result is not None:
                self._tell("isotrain_run_finished", result=self.result)
        self._close()

    def rewind_to(self, step: int) -> None:
        """Tells loggers, once they have started, that what was told of steps from this one on is void."""
        if self._began:
            self._write("resumed", step)
        else:
            self._rewound = step

    def _begin(self, plan: Mapping[str, Any]) -> None:
        """Starts the loggers, once: not before the processes, which it would slow down."""
        if not self._began:
            self._began = True
            self._write("started", plan, self._directory)
            if self._rewound is not None:
                self._write("resumed", self._rewound)

    def _tell(self, hook: str, **facts: Any) -> None:
        self._host.call_hook(hook, **facts, run_directory=str(self._directory))

    def _write(self, method: str, *facts: Any, steps: int = 0) -> None:
        for each in self._writers:
            each.put(method, *facts, steps=steps)

    def _close(self) -> None:
        """Waits for the loggers, and warns about those that went wrong."""
        deadline = time.monotonic() + writer_thread.CLOSE_TIMEOUT_SECONDS
        for each in self._writers:
            each.end()
        faults = [(each.name, each.wait(deadline)) for each in self._writers]
        for name, fault in faults:
            if fault is not None:
                warnings.warn(f"logger {name!r}: {fault}", stacklevel=3)
