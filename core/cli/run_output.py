"""Output of the commands that train: progress display, and the run's files for `--return-files`."""

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
    """A context whose value is the event callback that shows progress; None for the default display.

    Raises:
        PlanError: `--line-prefix` was given without `--json`.
    """
    from isotrain.core.reporting import progress
    from isotrain.core.reporting.display_thread import threaded_plain_display

    if options.line_prefix and not options.json:
        raise PlanError("--line-prefix TEXT is a prefix of the lines of --json: add --json.")
    if options.json:
        return threaded_plain_display(progress.json_lines(line_prefix=options.line_prefix))
    return contextlib.nullcontext()


@contextlib.contextmanager
def returning_files(options: argparse.Namespace, on_event: OnPlainEvent | None) -> Iterator[None]:
    """Sends the run's files as events when the block ends, also by an error, with `--return-files`.

    Not where the launcher sees the run directory itself.
    """
    try:
        yield
    finally:
        if getattr(options, "return_files", False) and not is_result_printed_by_rank_zero(options):
            from isotrain.core.launching.run_directory.remote_run_files import (
                launcher_sees_folder,
                return_files,
            )

            assert on_event is not None
            folder = Path(options.output)
            if not launcher_sees_folder(folder, options.line_prefix):
                return_files(folder, on_event)


def is_result_printed_by_rank_zero(options: argparse.Namespace) -> bool:
    """Whether this process is a rank, other than 0, of a run that was started from outside."""
    from isotrain.core.planning.cluster_environment import detect_cluster_info

    info = detect_cluster_info() if options.launcher in (None, LOCAL) else None
    return info is not None and info.rank > 0
