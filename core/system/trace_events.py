"""Time lines as a file for Perfetto and `chrome://tracing`: the Trace Event Format, in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.core.system.files import atomic_write

_MICRO = 1e6


@dataclass(frozen=True)
class Span:
    """One span of a time line.

    Attributes:
        track: Process that does it, such as `rank 0`.
        name: Activity: of a step `input`, `step` or the actions that it is made of, `device`.
        start_s: Start in seconds after the start of the time line.
        seconds: Duration in seconds.
    """

    track: str
    name: str
    start_s: float
    seconds: float


def write_trace(groups: Mapping[str, Sequence[Span]], file: Path) -> None:
    """Writes a trace: each group is a process of it, and each of a group's tracks a thread.

    Raises:
        OSError: The file cannot be written.
    """
    atomic_write(file, json.dumps({"traceEvents": list(_events(groups))}) + "\n")


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
