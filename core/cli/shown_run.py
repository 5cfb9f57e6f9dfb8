"""A run of a command: shown while it goes on, and its files handed over where that was asked for."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.errors import PlanError

if TYPE_CHECKING:
    from isotrain.core.contracts.events import OnPlainEvent


def shown(
    options: argparse.Namespace,
) -> contextlib.AbstractContextManager[OnPlainEvent | None]:
    """Within it, what it gives shows a training while it goes on."""
    from isotrain.core.showing import display
    from isotrain.core.showing.aside import plain_events_aside

    if options.mark and not options.json:
        raise PlanError("--mark TEXT goes before each line of --json: add that.")
    if options.json:
        return plain_events_aside(display.json_lines(mark=options.mark))
    return display.quiet() if options.quiet else contextlib.nullcontext()


@contextlib.contextmanager
def handed_over(options: argparse.Namespace, tell: OnPlainEvent | None) -> Iterator[None]:
    """Tells of the run's files after it, however it ends, where this was asked for and is of use."""
    try:
        yield
    finally:
        if getattr(options, "hand_over", False) and not speaks_for_another(options):
            from isotrain.core.launching.handed_over import hand_over, is_followed_from

            assert tell is not None
            folder = Path(options.run_dir)
            if not is_followed_from(folder, options.mark):
                hand_over(folder, tell)


def speaks_for_another(options: argparse.Namespace) -> bool:
    """Whether this process has joined a run of which rank 0 prints the result."""
    from isotrain.core.planning.own_place import place_to_join

    place = place_to_join() if options.launcher in (None, LOCAL) else None
    return place is not None and place.rank > 0
