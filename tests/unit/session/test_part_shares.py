"""Parts of a global batch are dealt by speed: the same on all processes, and only where steps get shorter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.data.batch import Batch
from isotrain.core.session.training import part_shares
from isotrain.core.session.training.part_shares import PartShares, dealt_by_speed

Counts = tuple[int, ...]


class ThreadGroup:
    """Replica group of a process that is a thread, and has one replica or several."""

    def __init__(
        self,
        local: tuple[int, ...],
        replicas: int,
        sent: list[list[float]],
        barrier: threading.Barrier,
    ) -> None:
        self.local_replicas, self.replicas = local, replicas
        self._sent, self._barrier = sent, barrier

    def synchronize_device(self) -> None:
        """All work is done."""

    def all_reduce_max(self, numbers: list[float]) -> list[float]:
        self._sent.append(numbers)
        self._barrier.wait()
        maxima = [max(column) for column in zip(*self._sent, strict=True)]
        if self._barrier.wait() == 0:
            self._sent.clear()
        self._barrier.wait()
        return maxima


def counts_of_steps(
    seconds: Callable[[int, int], float],
    processes: list[tuple[int, ...]],
    *,
    parts: int = 8,
    every: int = 2,
    steps: int = 12,
    rest: float = 0.0,
) -> list[Counts]:
    """Parts of each replica in each step, equal on all processes.

    Args:
        seconds: Function from the process and the step to the seconds of a part there.
        processes: Replicas of each process.
        parts: Parts of a global batch.
        every: Steps between two dealings.
        steps: Number of steps.
        rest: Seconds from the exchange to the end of a step.
    """
    local, replicas = threading.local(), sum(map(len, processes))
    sent: list[list[float]] = []
    barrier = threading.Barrier(len(processes), timeout=60)

    def run(process: int) -> list[Counts]:
        local.now = 100.0 * process
        group = ThreadGroup(processes[process], replicas, sent, barrier)
        shares = PartShares(cast(ReplicaGroup, group), parts, every)
        found = []
        for step in range(steps):
            found.append(shares.counts)
            batch = Batch(0, step, step, 64, False, False, (), part_counts=shares.counts)
            computed = max(shares.counts[replica] for replica in processes[process])
            local.now += computed * seconds(process, step)
            with shares.exchanging(batch):
                local.now += 1000.0
            local.now += rest
            before = shares.counts
            assert shares.step_done() is (shares.counts != before)
        return found

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(processes)) as threads:
        patch.setattr(part_shares, "clock", lambda: local.now)
        running = [threads.submit(run, process) for process in range(len(processes))]
        wait(running, return_when="FIRST_EXCEPTION")
        if failed := [each for each in running if each.done() and each.exception()]:
            barrier.abort()  # the others wait there
            failed[0].result()
        first, *others = [each.result() for each in running]
    assert all(found == first for found in others)
    return first


def test_a_slow_process_gets_fewer_parts() -> None:
    """From the step after the first `every` that are measured, which begin with the second one."""
    found = counts_of_steps(lambda process, step: [1.0, 2.0, 4.0][process], [(0,), (1,), (2,)])
    assert found == [(3, 3, 2)] * 3 + [(5, 2, 1)] * 9


def test_shares_follow_a_process_that_becomes_slow() -> None:
    found = counts_of_steps(
        lambda process, step: 3.0 if process == 0 and step >= 5 else 1.0, [(0,), (1,)]
    )
    assert found[:7] == [(4, 4)] * 7
    assert found[7:] == [(2, 6)] * 5


def test_a_process_that_was_slow_gets_its_parts_back_at_once() -> None:
    """Though the rest of a step takes as long as many parts."""
    found = counts_of_steps(
        lambda process, step: 20.0 if process == 0 and step < 5 else 1.0, [(0,), (1,)], rest=10.0
    )
    assert found == [(4, 4)] * 3 + [(1, 7)] * 4 + [(4, 4)] * 5


def test_a_process_with_a_slow_update_gets_fewer_parts() -> None:
    counts = dealt_by_speed(8, [1.0, 1.0], [4.0, 0.0])
    assert counts == (2, 6)


def test_equal_processes_keep_equal_shares() -> None:
    """Though their speeds differ a little."""
    found = counts_of_steps(lambda process, step: 1 + 0.01 * (process ^ step & 1), [(0,), (1,)])
    assert set(found) == {(4, 4)}


def test_a_slow_step_is_no_slow_process() -> None:
    found = counts_of_steps(
        lambda process, step: 50.0 if (process, step) == (1, 4) else 1.0, [(0,), (1,)], every=5
    )
    assert set(found) == {(4, 4)}


def test_replicas_of_a_process_have_its_speed() -> None:
    found = counts_of_steps(lambda process, step: [1.0, 3.0][process], [(0, 1), (2,)])
    assert found[-1] == (4, 3, 1)


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 100)), min_size=1, max_size=6),
    st.integers(0, 20),
)
def test_no_other_dealing_is_done_sooner(replicas: list[tuple[float, float]], further: int) -> None:
    seconds, rests = ([*column] for column in zip(*replicas, strict=True))
    counts = dealt_by_speed(len(seconds) + further, seconds, rests)
    assert min(counts) >= 1
    assert sum(counts) == len(seconds) + further
    longest = max(rest + n * each for n, (each, rest) in zip(counts, replicas, strict=True))
    sooner = [max(1, int((longest * (1 - 1e-9) - rest) / each)) for each, rest in replicas]
    is_floor = longest == max(rest + each for each, rest in replicas)
    assert is_floor or sum(sooner) < sum(counts), "all parts fit into less time"
