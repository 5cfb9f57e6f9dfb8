"""The images, histograms and texts that a program has logged, as the page of a run shows them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from isotrain.analysis.run_report.run_files import RunFiles
from isotrain.core.contracts.events import MediaLogged
from isotrain.core.quantities import counted

_MAX_SHOWN = 24
_MAX_IMAGE_BYTES = 2**20
_MAX_TEXT = 2000
_BOX = 100


@dataclass(frozen=True)
class LoggedMedia:
    """The newest file of a name and kind.

    Attributes:
        name: Name under which it was logged.
        caption: Its step, and how many files there are.
        image: The image as a `data:` URL; empty if it is none, or too large for a page.
        text: The text, or what is to be said instead of a large image; empty for a histogram.
        bars: The bins of a histogram, each with left edge, width and height in a box of 100 by 100.
        edges: First and last edge of the histogram.
    """

    name: str
    caption: str
    image: str = ""
    text: str = ""
    bars: tuple[tuple[float, float, float], ...] = ()
    edges: tuple[float, float] = (0.0, 0.0)


def logged_media(run: RunFiles) -> tuple[list[LoggedMedia], int]:
    """The newest file of each name and kind, in the order in which these were first logged; 24 at most.

    Returns:
        What the page shows, and how many more there are.
    """
    events: dict[tuple[str, str], dict[int, MediaLogged]] = {}
    for event in run.events:
        if isinstance(event, MediaLogged):
            events.setdefault((event.name, event.media), {})[event.logged_step] = event
    shown = [*events.values()][:_MAX_SHOWN]
    return [*_newest(run.folder, shown)], len(events) - len(shown)


def _newest(folder: Path, shown: Iterable[dict[int, MediaLogged]]) -> Iterator[LoggedMedia]:
    for by_step in shown:
        newest = by_step[max(by_step)]
        path = folder / newest.file
        if path.is_file():
            count = counted(len(by_step), "file")
            yield _of_file(path, newest, f"step {newest.logged_step:,}, the newest of {count}")


def _of_file(path: Path, event: MediaLogged, caption: str) -> LoggedMedia:
    content = path.read_bytes()
    if event.media == "image":
        if len(content) > _MAX_IMAGE_BYTES:
            return LoggedMedia(event.name, caption, text=f"The image is in {event.file}.")
        data = base64.b64encode(content).decode()
        return LoggedMedia(event.name, caption, image=f"data:image/png;base64,{data}")
    if event.media == "text":
        text = content.decode(errors="replace")
        shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
        return LoggedMedia(event.name, caption, text=shown)
    found = json.loads(content)
    counts, edges = found["counts"], found["edges"]
    width = _BOX / len(counts)
    bars = tuple(
        (round(index * width, 3), round(width, 3), round(_BOX * count / max(counts), 3))
        for index, count in enumerate(counts)
    )
    return LoggedMedia(event.name, caption, bars=bars, edges=(edges[0], edges[-1]))
