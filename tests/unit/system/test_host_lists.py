"""Lists of hosts and counts as schedulers write them: against a slow and obvious reading of them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as some

from isotrain.core.errors import ClusterInfoError
from isotrain.core.system.hostlist import counts_per_host, host_list

letters = some.text("abcxyz-.", min_size=1, max_size=4)
ranges = some.tuples(some.integers(0, 120), some.integers(0, 4), some.integers(0, 4)).map(
    lambda drawn: (str(drawn[0]).zfill(drawn[2]), drawn[1])
)
"""The first number of a range as it is written, and how many more there are."""
brackets = some.lists(ranges, min_size=1, max_size=3)
Name = tuple[str, list[tuple[list[tuple[str, int]], str]]]
names: some.SearchStrategy[Name] = some.tuples(
    letters, some.lists(some.tuples(brackets, letters | some.just("")), max_size=2)
)


def written(first: str, more: int) -> str:
    return f"{first}-{int(first) + more}" if more else first


def short(name: Name) -> str:
    """The name as a scheduler writes it."""
    start, parts = name
    return start + "".join(
        f"[{','.join(written(*each) for each in bracket)}]{text}" for bracket, text in parts
    )


def long(name: str) -> list[str]:
    """Simple expansion: the first bracket is replaced by each of its numbers, and then the next."""
    before, bracket, after = re.fullmatch(r"([^\[]*)(?:\[([^\]]*)\])?(.*)", name).groups()  # type: ignore[union-attr]
    if bracket is None:
        return [before]
    numbers = []
    for part in bracket.split(","):
        first, last = part.split("-") if "-" in part else (part, part)
        number = int(first)
        while number <= int(last):
            text = str(number)
            while len(text) < len(first):
                text = "0" + text
            numbers.append(text)
            number += 1
    return [host for number in numbers for host in long(before + number + after)]


@given(some.lists(names, min_size=1, max_size=4))
def test_compressed_lists_equal_a_simple_expansion(
    drawn: list[Name],
) -> None:
    texts = [short(name) for name in drawn]
    assert host_list(",".join(texts)) == [host for text in texts for host in long(text)]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[01-03,07],gpu-a[1-2]-ib", ["n01", "n02", "n03", "n07", "gpu-a1-ib", "gpu-a2-ib"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[0-1]n[08-09].site", ["r0n08.site", "r0n09.site", "r1n08.site", "r1n09.site"]),
        ("b,a", ["b", "a"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert host_list(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "n[", "n[1-2", "n]", "n[2-1]", "n[a-b]", "n1,", ",n1", "n[]", "n1 n2"]
)
def test_malformed_host_lists_are_refused(text: str) -> None:
    with pytest.raises(ClusterInfoError, match="is no list of hosts"):
        host_list(text)


@given(some.lists(some.tuples(some.integers(0, 300), some.integers(1, 5)), min_size=1, max_size=6))
def test_counts_are_repeated(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert counts_per_host(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "a", "2,,1", "-1"])
def test_malformed_count_lists_are_refused(text: str) -> None:
    with pytest.raises(ClusterInfoError, match="is no list of counts"):
        counts_per_host(text)
