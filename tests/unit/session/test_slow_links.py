"""Which replicas have slow links: the same answer on all processes, and none where links are equal."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.state import StateInfo
from isotrain.core.session.training import slow_links
from isotrain.core.session.training.slow_links import (
    PROBE,
    pairings,
    replicas_with_slow_links,
    slower_ones,
)


def test_a_much_slower_replica_is_found() -> None:
    assert slower_ones([1, 1, 1, 10]) == (3,)
    assert slower_ones([1, 20, 1]) == (1,)
    assert slower_ones([20, 1, 1, 25, 1, 1]) == (0, 3)


@pytest.mark.parametrize("seconds", [[1, 1], [1, 100], [1, 1, 1], [1, 2, 2, 3], [9, 9, 1, 9]])
def test_no_replica_is_where_the_exchange_would_not_be_shorter(seconds: list[float]) -> None:
    """Two sum for each other in any case; and one alone for three others would be no gain."""
    assert slower_ones(seconds) == ()


@given(st.lists(st.floats(0.001, 100), min_size=2, max_size=9))
def test_at_most_half_of_the_replicas_are_and_no_other_is_slower(seconds: list[float]) -> None:
    found = slower_ones(seconds)
    others = [each for index, each in enumerate(seconds) if index not in found]
    assert len(found) <= len(seconds) // 2
    assert not found or min(seconds[each] for each in found) >= max(others)


@pytest.mark.parametrize("replicas", range(2, 10))
def test_each_replica_meets_each_other_once(replicas: int) -> None:
    met = set()
    for partners in pairings(replicas):
        assert sorted(partners) == list(range(replicas))
        assert all(partners[other] == one for one, other in enumerate(partners))
        pairs = {(one, other) for one, other in enumerate(partners) if one != other}
        assert len(pairs) == replicas - replicas % 2
        assert not met & pairs
        met |= pairs
    assert len(met) == replicas * (replicas - 1)


class ThreadGroup:
    """Replica group of a process that is a thread; a swap moves its clock as the slower link of both does."""

    def __init__(self, local: tuple[int, ...], elements: int, shared: dict[str, Any]) -> None:
        self.local_replicas, self.replicas = local, len(shared["seconds"])
        self._elements, self._shared = elements, shared
        self._swaps = 0

    def describe_state(self, kinds: Any) -> dict[str, StateInfo]:
        return {"w": StateInfo((self._elements,), "float32", 4 * self._elements)}

    def tensor(self, array: np.ndarray) -> np.ndarray:
        return array

    def numpy(self, tensor: np.ndarray) -> np.ndarray:
        return tensor

    def compute(self, computation: Any, vectors: Any, static: Any) -> Any:
        seconds, here = self._shared["seconds"], self.local_replicas
        pairs = [(each, static[each]) for each in here if static[each] not in here]
        late = 100.0 * (self._swaps % 4 == 0)  # the partner has not arrived yet
        self._swaps += 1
        self._shared["local"].now += max(
            (max(seconds[p] for p in pair) for pair in pairs), default=0
        )
        self._shared["local"].now += late + 0.001
        return vectors

    def all_reduce_max(self, numbers: list[float]) -> list[float]:
        self._shared["sent"].append(numbers)
        self._shared["barrier"].wait()
        return [max(column) for column in zip(*self._shared["sent"], strict=True)]


def found(
    seconds: list[float], processes: list[tuple[int, ...]], elements: int = PROBE
) -> list[tuple[int, ...]]:
    """What each process finds, by the seconds of each replica's link."""
    barrier = threading.Barrier(len(processes), timeout=60)
    shared = {"seconds": seconds, "sent": [], "barrier": barrier, "local": threading.local()}

    def run(local: tuple[int, ...]) -> tuple[int, ...]:
        shared["local"].now = 0.0
        group = cast(ReplicaGroup, ThreadGroup(local, elements, shared))
        return replicas_with_slow_links(group)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(processes)) as threads:
        patch.setattr(slow_links, "clock", lambda: shared["local"].now)
        return list(threads.map(run, processes))


def test_links_are_measured_by_swaps_with_several_others() -> None:
    assert found([1, 1, 30, 1], [(0,), (1,), (2,), (3,)]) == [(2,)] * 4
    assert found([1, 30, 1], [(0,), (1,), (2,)]) == [(1,)] * 3
    assert found([1, 1, 1, 1], [(0,), (1,), (2,), (3,)]) == [()] * 4


def test_small_models_and_replicas_of_one_process_are_not_measured() -> None:
    assert found([1, 1, 30, 1], [(0,), (1,), (2,), (3,)], PROBE - 1) == [()] * 4
    assert found([1, 1, 30, 1], [(0, 1, 2, 3)]) == [()]
    assert found([1, 30], [(0,), (1,)]) == [()] * 2
