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


def progress_display(
    options: argparse.Namespace,
) -> contextlib.AbstractContextManager[OnPlainEvent | None]:
    """Within it, what it gives shows a training while it goes on."""
    from isotrain.core.reporting import progress
    from isotrain.core.reporting.display_thread import threaded_plain_display

    if options.line_prefix and not options.json:
        raise PlanError("--line-prefix TEXT goes before each line of --json: add that.")
    if options.json:
        return threaded_plain_display(progress.json_lines(line_prefix=options.line_prefix))
    return progress.quiet() if options.quiet else contextlib.nullcontext()


@contextlib.contextmanager
def returning_files(options: argparse.Namespace, tell: OnPlainEvent | None) -> Iterator[None]:
    """Tells of the run's files after it, however it ends, where this was asked for and is of use."""
    try:
        yield
    finally:
        if getattr(options, "return_files", False) and not is_result_printed_by_rank_zero(options):
            from isotrain.core.launching.run_directory.remote_run_files import (
                launcher_sees_folder,
                return_files,
            )

            assert tell is not None
            folder = Path(options.run_dir)
            if not launcher_sees_folder(folder, options.line_prefix):
                return_files(folder, tell)


def is_result_printed_by_rank_zero(options: argparse.Namespace) -> bool:
    """Whether this process has joined a run of which rank 0 prints the result."""
    from isotrain.core.planning.cluster_environment import detect_cluster_info

    place = detect_cluster_info() if options.launcher in (None, LOCAL) else None
    return place is not None and place.rank > 0
