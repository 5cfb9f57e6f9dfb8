"""Parsers of the compact host lists and count lists that schedulers write (SLURM, Flux)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from isotrain.core.errors import ClusterInfoError

_PART = re.compile(r"(?P<text>[^\[\],\s]+)|\[(?P<ranges>[^\[\]]+)\]")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?", re.ASCII)
_COUNT = re.compile(r"(?P<count>\d+)(?:\(x(?P<times>\d+)\))?", re.ASCII)


def host_list(text: str) -> list[str]:
    """Expands a host list of SLURM or Flux, such as `n[01-03,07],gpu-a[1-2]-ib`, in its order.

    Numbers keep the width of the first of their range; of several brackets in a name the last varies fastest.

    Raises:
        ClusterInfoError: The text is no host list.
    """
    hosts: list[str] = []
    position = 0
    while True:
        parts, position = _parse_name(text, position)
        hosts += map("".join, itertools.product(*parts))
        if position == len(text):
            return hosts
        position += 1


def counts_per_host(text: str) -> list[int]:
    """Expands a count list of SLURM, such as `2(x3),1` for `[2, 2, 2, 1]`: one count per host.

    Raises:
        ClusterInfoError: The text is no count list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ClusterInfoError(f"{text!r} is no list of counts; expected such as 2(x3),1.")
        counts += [int(match["count"])] * int(match["times"] or 1)
    return counts


def _parse_name(text: str, position: int) -> tuple[list[list[str]], int]:
    """The alternatives of each part of the name that begins at a position, and the position after it."""
    parts: list[list[str]] = []
    while (match := _PART.match(text, position)) is not None:
        parts.append([match["text"]] if match["text"] else list(_numbers(match["ranges"], text)))
        position = match.end()
    if not parts or (position < len(text) and text[position] != ","):
        raise _no_list(text)
    return parts, position


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Numbers of a bracket's ranges, zero-padded; `text` is the whole list, for the error."""
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
