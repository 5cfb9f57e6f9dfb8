"""What is written down and told of a run while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isotrain.core.contracts.events import Event
from isotrain.core.launching.run_directory import RunDirectory
from isotrain.core.loggers.audience import EventDispatcher


@dataclass(frozen=True)
class RunRecords:
    """A run's directory, those who hear of it, and the display.

    Attributes:
        directory: Keeps all events.
        dispatcher: Event hooks and loggers.
        show: Shows an event to the person.
    """

    directory: RunDirectory
    dispatcher: EventDispatcher
    show: Callable[[Event], None]

    def on_event(self, event: Event) -> None:
        """Takes an event that the directory has already."""
        self.show(event)
        self.dispatcher.dispatch(event)

    def note(self, event: Event) -> None:
        """Takes an event that no process has told."""
        self.directory.append_event(event)
        self.on_event(event)

    def rewind(self, step: int) -> None:
        """Forgets what was told of steps from this one on: they are taken again."""
        self.directory.rewind(step)
        self.dispatcher.rewind_to(step)
