"""Time lines as a file for Perfetto and `chrome://tracing`: the Trace Event Format, in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.analysis.pages.timeline import Span
from isotrain.core.system.files import atomic_write

TRACE_FILE = "trace.json"
_MICRO = 1e6


def write_trace(groups: Mapping[str, Sequence[Span]], folder: Path) -> None:
    """Writes `trace.json`: each group is a process of the trace, and each of its tracks a thread.

    Raises:
        OSError: The file cannot be written.
    """
    atomic_write(folder / TRACE_FILE, json.dumps({"traceEvents": list(_events(groups))}) + "\n")


def _events(groups: Mapping[str, Sequence[Span]]) -> Iterator[dict[str, Any]]:
    for pid, (group, spans) in enumerate(groups.items()):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": group}}
        tracks = list(dict.fromkeys(span.track for span in spans))
        for tid, track in enumerate(tracks):
            name = {"name": track}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": name}
        yield from _complete_events(pid, tracks, spans)


def _complete_events(
    pid: int, tracks: Sequence[str], spans: Iterable[Span]
) -> Iterator[dict[str, Any]]:
    for span in spans:
        yield {
            "ph": "X",
            "pid": pid,
            "tid": tracks.index(span.track),
            "name": span.name,
            "ts": span.start_s * _MICRO,
            "dur": span.seconds * _MICRO,
        }
