"""The short forms in which schedulers write hosts and counts of processes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from isotrain.core.errors import ClusterInfoError

_PART = re.compile(r"(?P<text>[^\[\],\s]+)|\[(?P<ranges>[^\[\]]+)\]")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?", re.ASCII)
_COUNT = re.compile(r"(?P<count>\d+)(?:\(x(?P<times>\d+)\))?", re.ASCII)


def host_list(text: str) -> list[str]:
    """The hosts that a list such as `n[01-03,07],gpu-a[1-2]-ib` stands for, in its order.

    Numbers keep the width of the first of their range; several brackets in a name count like digits, the last
    one fastest. SLURM and Flux write hosts so.

    Raises:
        ClusterInfoError: It is no such list.
    """
    found: list[str] = []
    position = 0
    while True:
        parts, position = _name(text, position)
        found += map("".join, itertools.product(*parts))
        if position == len(text):
            return found
        position += 1


def counts_per_host(text: str) -> list[int]:
    """The numbers that a list such as `2(x3),1` stands for: one for each host. SLURM writes so.

    Raises:
        ClusterInfoError: It is no such list.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ClusterInfoError(f"{text!r} is no list of counts; expected such as 2(x3),1.")
        found += [int(match["count"])] * int(match["times"] or 1)
    return found


def _name(text: str, position: int) -> tuple[list[list[str]], int]:
    """The parts of the name that begins at a position, each with its alternatives, and where it ends."""
    parts: list[list[str]] = []
    while (match := _PART.match(text, position)) is not None:
        parts.append([match["text"]] if match["text"] else list(_numbers(match["ranges"], text)))
        position = match.end()
    if not parts or (position < len(text) and text[position] != ","):
        raise _no_list(text)
    return parts, position


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _no_list(text)
        first, last = match["first"], match["last"] or match["first"]
        if int(last) < int(first):
            raise _no_list(text)
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _no_list(text: str) -> ClusterInfoError:
    return ClusterInfoError(
        f"{text!r} is no list of hosts; expected such as n[01-03,07],gpu-a[1-2]-ib."
    )
