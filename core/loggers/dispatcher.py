"""Dispatches the events of a run to the plugins' event hooks and to the run's loggers."""

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
    MediaLogged,
    Ready,
    Scalars,
    Steps,
)
from isotrain.core.contracts.logger import Logger
from isotrain.core.loggers import writer_thread
from isotrain.core.loggers.writer_thread import WriterThread
from isotrain.core.plugins.manager import PluginManager


class EventDispatcher:
    """Calls event hooks and loggers for one run; their errors never end it.

    A context manager: entered before the run's processes start; on exit, it reports how the run ended.

    Attributes:
        result: The contents of the result file; to be set before exit, if there is a result.
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
        self._has_started = False
        self._rewind_step: int | None = None
        self.result: Mapping[str, Any] | None = None

    def __enter__(self) -> Self:
        self._call_hook("isotrain_run_started", plan=self._plan)
        return self

    def dispatch(self, event: Event) -> None:
        """Passes an event of a process on to hooks and loggers."""
        if isinstance(event, Ready) and event.plan is not None:
            self._start_loggers(event.plan)
        elif isinstance(event, Steps):
            arguments = event.first, event.losses, event.learning_rates
            self._call_loggers("steps_done", *arguments, steps=len(event.losses))
        elif isinstance(event, Scalars):
            records = list(zip(event.steps, event.values, strict=True))
            self._call_loggers("scalars_logged", records, steps=len(records))
        elif isinstance(event, MediaLogged):
            path = self._directory / event.file
            if path.exists():  # rank 0 may be on another host, which sends its files at the end
                facts = event.logged_step, event.name, event.media, path
                self._call_loggers("media_logged", *facts, steps=1)
        elif isinstance(event, EpochEnded):
            epoch, done = event.epoch, event.done
            loss = {} if event.loss is None else {"loss": event.loss}
            metrics = {**loss, **event.metrics}
            self._call_hook("isotrain_epoch_ended", epoch=epoch, step=done, metrics=metrics)
            self._call_loggers("epoch_ended", epoch, done, metrics, steps=1)
        elif isinstance(event, CheckpointSaved):
            step, location = event.done, event.location
            self._call_hook("isotrain_checkpoint_saved", step=step, location=location)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._start_loggers(self._plan)
        if error is not None:
            message = str(error) or type(error).__name__
            self._call_loggers("failed", message)
            self._call_hook("isotrain_run_failed", message=message)
        else:
            self._call_loggers("finished", self.result)
            if self.result is not None:
                self._call_hook("isotrain_run_finished", result=self.result)
        self._close_loggers()

    def rewind_to(self, step: int) -> None:
        """Tells loggers to drop what they have of this step and later ones; now, or when they start."""
        if self._has_started:
            self._call_loggers("resumed", step)
        else:
            self._rewind_step = step

    def _start_loggers(self, plan: Mapping[str, Any]) -> None:
        """Starts the loggers, once: not before the processes, which it would slow down."""
        if not self._has_started:
            self._has_started = True
            self._call_loggers("started", plan, self._directory)
            if self._rewind_step is not None:
                self._call_loggers("resumed", self._rewind_step)

    def _call_hook(self, hook: str, **arguments: Any) -> None:
        self._host.call_hook(hook, **arguments, run_directory=str(self._directory))

    def _call_loggers(self, method: str, *arguments: Any, steps: int = 0) -> None:
        for each in self._writers:
            each.put(method, *arguments, steps=steps)

    def _close_loggers(self) -> None:
        """Waits for the loggers, and warns about those that failed or were too slow."""
        deadline = time.monotonic() + writer_thread.CLOSE_TIMEOUT_SECONDS
        for each in self._writers:
            each.end()
        faults = [(each.name, each.wait(deadline)) for each in self._writers]
        for name, fault in faults:
            if fault is not None:
                warnings.warn(f"logger {name!r}: {fault}", stacklevel=3)
