"""Shows the output of selected ranks during a run, by reading their logs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from isotrain.core.contracts.events import Event, OnEvent, Output
from isotrain.core.launching.run_directory.pipes import LogTail
from isotrain.core.launching.run_directory.run_directory import rank_log

_POLL_SECONDS = 0.2


@contextlib.contextmanager
def shown_ranks(folder: Path, ranks: Sequence[int], show: OnEvent) -> Iterator[OnEvent]:
    """Context in which the output of selected ranks is passed to a listener as it is written.

    Args:
        folder: Run directory with the logs of the ranks.
        ranks: Ranks whose output to show.
        show: Listener for every event and for the output; called by one thread at a time.

    Yields:
        Listener for the run's events, which passes them to `show`; without rank 0's output, if not selected.
    """
    others = [rank for rank in dict.fromkeys(ranks) if rank != 0]
    lock = threading.Lock()

    def on_event(event: Event) -> None:
        if isinstance(event, Output) and event.rank not in ranks:
            return
        with lock:
            show(event)

    with _follow_logs(folder, others, on_event) if others else contextlib.nullcontext():
        yield on_event


@contextlib.contextmanager
def _follow_logs(folder: Path, ranks: Sequence[int], on_event: OnEvent) -> Iterator[None]:
    tails = {rank: LogTail(rank_log(folder, rank), from_start=False) for rank in ranks}
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(_POLL_SECONDS):
            for rank, tail in tails.items():
                _send_output(rank, tail.lines(), on_event)

    thread = threading.Thread(target=follow, name="shown ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for rank, tail in tails.items():
            _send_output(rank, tail.rest(), on_event)


def _send_output(rank: int, lines: Sequence[str], on_event: OnEvent) -> None:
    if lines:
        on_event(Output(rank=rank, text="".join(lines)))
