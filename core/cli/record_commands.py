"""What the commands that look at runs do; `record_arguments` has their arguments."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from isotrain.core.contracts.events import Output
from isotrain.core.errors import IsotrainError
from isotrain.core.json_text import FORMAT, json_page
from isotrain.core.system.visible_text import visible_output

_POLL_SECONDS = 0.2


def runs(options: argparse.Namespace) -> None:
    """Lists runs."""
    from isotrain.core.launching.recorded_runs import runs_in

    found = [run.to_dict() for run in runs_in(options.folder)]
    if options.json:
        print(json_page({"format": FORMAT, "runs": found}))
        return
    from isotrain.core.showing import record_texts

    sys.stdout.write(record_texts.runs(found))


def logs(options: argparse.Namespace) -> None:
    """Prints a log; with --json, one object for each line."""
    for line in _lines(Path(options.run), options.rank, options.follow):
        if options.json:
            line = Output(rank=options.rank, text=line).to_line().decode()
        else:
            line = visible_output(line, colours=sys.stdout.isatty())
        sys.stdout.write(line)
        sys.stdout.flush()


def _lines(folder: Path, rank: int, follow: bool) -> Iterator[str]:
    from isotrain.core.launching.log_tail import LogTail
    from isotrain.core.launching.run_directory import RunDirectory, rank_log

    directory = RunDirectory.reopen(folder)
    log = rank_log(directory.path, rank)
    if not log.exists():
        _refuse(directory.path, rank)
    tail = LogTail(log, from_start=True)
    while follow and directory.is_locked():
        yield from tail.lines()
        time.sleep(_POLL_SECONDS)
    yield from tail.rest()


def _refuse(folder: Path, rank: int) -> None:
    names = (path.stem.removeprefix("rank-") for path in folder.glob("rank-*.log"))
    listed = ", ".join(map(str, sorted(int(each) for each in names if each.isdecimal()))) or "none"
    raise IsotrainError(
        f"--rank {rank}: {folder} has no output of this rank. Available: {listed}. What ranks print on"
        " other hosts may be in a folder of that name there."
    )
