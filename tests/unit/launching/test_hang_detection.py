"""Processes that lack a processor are slow and not lost; those that hang are lost on a busy machine too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.waiting import wait_until

from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.contracts.reporter import (
    BETWEEN_CALLS,
    WAITING_FOR_MEMBERS,
    WAITING_TO_JOIN,
    Status,
)
from isotrain.core.launching.supervision.failure_diagnosis import RankStatus
from isotrain.core.launching.supervision.hang_detection import CpuStarvation, HangDetector
from isotrain.core.system import deadline
from isotrain.core.system.deadline import Deadline
from isotrain.core.system.process_activity import waits

SPIN = "print(flush=True)\nwhile True: pass"
SLEEP = "import time; print(flush=True); time.sleep(600)"
ENOUGH_SECONDS = 0.4
"""Waits that add up to so much are many: a wait is a few milliseconds long."""


@pytest.fixture
def on_one_processor() -> Iterator[list[int]]:
    """Two processes that compute on one processor, and one beside them that sleeps."""
    own = min(os.sched_getaffinity(0))
    with ExitStack() as ending:
        pids = []
        for program in (SPIN, SPIN, SLEEP):
            process = ending.enter_context(
                subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
            )
            ending.callback(process.kill)
            os.sched_setaffinity(process.pid, {own})
            assert process.stdout is not None
            process.stdout.readline()
            pids.append(process.pid)
        yield pids


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_computing_process_waits_for_the_processor_and_a_sleeping_one_does_not(
    on_one_processor: list[int],
) -> None:
    def seen(pid: int) -> Any:
        return type("Seen", (), {"waits": property(lambda self: waits(pid))})()

    def waited() -> float:
        return max(waits(on_one_processor[0]).values())

    wait_until(lambda: waited() > ENOUGH_SECONDS, 60)
    starvation = CpuStarvation([RankStatus(seen(pid), 0.0, 0.0) for pid in on_one_processor])
    began, earlier = time.monotonic(), waited()
    assert starvation.of(0, call=began) < earlier, "waits before the call do not count"
    wait_until(lambda: starvation.of(0, call=began) >= ENOUGH_SECONDS, 60)
    assert starvation.of(2, call=began) < starvation.of(0, call=began) / 2


LIMIT = 10.0


def judged(*processes: tuple[str, float, float], starved: tuple[float, ...]) -> list[str | None]:
    """What processes are lost for, each given its call, how long that takes, and at which step it is.

    Args:
        processes: By rank.
        starved: For how long each of two threads of rank 1 has lacked a processor since the first look.
    """
    now = 1000.0
    found: list[Any] = [
        SimpleNamespace(
            info=ProcessInfo(rank),
            status=Status(int(step), now - took, call),
            is_gone=False,
            waits={},
        )
        for rank, (call, took, step) in enumerate(processes)
    ]
    watched = [
        RankStatus(process, last_heard=now, last_active=now, started=True) for process in found
    ]
    stagnation = HangDetector(watched, {"start": LIMIT, "progress": LIMIT})
    stagnation.find(now - max(took for _, took, _ in processes) + 0.75 * LIMIT)
    found[1].waits = dict(enumerate(starved))
    stagnation.find(now)
    return [each.lost for each in watched]


@pytest.mark.parametrize("call", ["step", BETWEEN_CALLS])
@pytest.mark.parametrize(
    ("took", "starved", "is_lost"),
    [
        (15, (), True),
        (15, (4.0, 4.0), True),
        (15, (1.0, 6.0), False),
        (35, (26.0,), False),
        (45, (44.0,), True),
        (9, (), False),
    ],
)
def test_a_starved_rank_is_excused_within_bounds(
    call: str, took: float, starved: tuple[float, ...], is_lost: bool
) -> None:
    first, second = judged(("step", took, 4), (call, took, 3), starved=starved)
    assert first is None
    assert (second is not None) is is_lost


def test_a_starved_rank_excuses_nobody_else() -> None:
    first, second = judged(("step", 15, 3), ("step", 15, 4), starved=(9.0,))
    assert first is not None
    assert "made no progress for 15 s" in first
    assert second is None


@pytest.mark.parametrize(("seconds", "is_lost"), [(0.0, True), (8.0, False)])
def test_a_call_is_excused_while_the_launcher_was_stopped(seconds: float, is_lost: bool) -> None:
    """The whole machine may have been stopped, and the rank in the call with it."""
    now = time.monotonic()
    process: Any = SimpleNamespace(
        info=ProcessInfo(0),
        status=Status(3, now - 15, "step"),
        is_gone=False,
        waits={},
    )
    watched = RankStatus(process, last_heard=now, last_active=now, started=True)
    stagnation = HangDetector([watched], {"start": LIMIT, "progress": LIMIT})
    stagnation.excuse(seconds)
    stagnation.find(now)
    assert (watched.lost is not None) is is_lost


def test_members_that_wait_for_a_newcomer_are_excused_while_it_starts() -> None:
    now = time.monotonic()
    found: list[Any] = [
        SimpleNamespace(
            info=ProcessInfo(rank), status=Status(3, now - took, call), is_gone=False, waits={}
        )
        for rank, (call, took) in enumerate(
            [(WAITING_FOR_MEMBERS, 5 * LIMIT), (BETWEEN_CALLS, 5 * LIMIT), ("load data", 1.0)]
        )
    ]
    watched = [RankStatus(each, last_heard=now, last_active=now, started=True) for each in found]
    watched[2].joins = True
    stagnation = HangDetector(watched, {"start": LIMIT, "progress": LIMIT})
    stagnation.find(now)
    found[2].status = Status(None, now, WAITING_TO_JOIN)
    stagnation.find(now + 0.5 * LIMIT)
    assert not any(each.lost for each in watched)
    stagnation.find(now + 1.5 * LIMIT)
    assert [bool(each.lost) for each in watched] == [False, True, False]


def test_a_stopped_machine_uses_little_of_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waiting = Deadline(2.0)
    for moment in (0.2, 60.2, 60.4, 60.8, 61.2):
        now[0] = moment
        assert not waiting.is_over
    now[0] = 61.6
    assert waiting.is_over
