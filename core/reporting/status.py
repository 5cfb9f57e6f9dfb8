"""Status of a call that takes seconds: a spinner in a terminal, lines in a notebook, nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from isotrain.core.system.standard_streams import can_redraw

OnProgress = Callable[[str], None]
"""Callback that receives lines of text on the progress of a call."""


def is_watched() -> bool:
    """Whether standard error is a terminal, or this process is the kernel of a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def print_status(line: str) -> None:
    """Prints a line to standard error at once."""
    print(line, file=sys.stderr, flush=True)


def default_progress(quiet: bool) -> OnProgress:
    """The callback for a caller who passed none: prints lines where someone is watching."""
    return print_status if is_watched() and not quiet else ignore_status


def ignore_status(line: str) -> None:
    """Ignores a line."""


@contextlib.contextmanager
def waiting(activity: str, *, quiet: bool = False) -> Iterator[None]:
    """Shows what the block does while it runs; in a terminal with a spinner and the time."""
    if quiet or not is_watched():
        yield
        return
    if not can_redraw(sys.stderr):
        print_status(f"{activity} ...")
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(activity)
        yield


@contextlib.contextmanager
def noting_interrupt(note: str) -> Iterator[None]:
    """Adds a note to a `KeyboardInterrupt` of the block: what is left, and how to go on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(note)
        raise
