"""Steps are told of in blocks, each once and in order, and none is kept."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from isotrain.core.contracts.events import ProcessEvent, Progress, Scalars, Steps, Warned
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data.batch import Batch
from isotrain.core.errors import NotANumberError
from isotrain.core.session.training import step_logger
from isotrain.core.session.training.nan_guard import NanGuard, OnNan
from isotrain.core.session.training.step_logger import STEPS_AT_ONCE, StepLogger
from isotrain.core.session.training.timers import Stopwatch


class Heard(Reporter):
    """Hands over what it is told, as the launcher would read it; keeps it only if asked to."""

    def __init__(self, keep: bool = True) -> None:
        super().__init__()
        self.keep = keep
        self.events: list[ProcessEvent] = []

    @property
    def has_listener(self) -> bool:
        return True

    def emit(self, event: ProcessEvent) -> None:
        event.to_line()
        if self.keep:
            self.events.append(event)

    def steps(self) -> list[Steps]:
        return [event for event in self.events if isinstance(event, Steps)]


class Late:
    """A loss that comes later than its step."""

    def __init__(self) -> None:
        self.is_ready = False

    def __float__(self) -> float:
        self.is_ready = True
        return 4.0


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    monkeypatch.setattr(step_logger, "STEPS_SECONDS", 1e9)
    return Heard()


def reports(heard: Heard, action: OnNan = "stop") -> StepLogger:
    watch = NanGuard(action, heard, lambda step: f"(of step {step})")
    return StepLogger(heard, Stopwatch(), 10**7, watch)


def batch(step: int) -> Batch:
    return Batch(0, 0, step, 8, False, True, ())


def add_all(own: StepLogger, losses: Sequence[float]) -> None:
    for step, loss in enumerate(losses):
        own.add(batch(step), loss, 0.1)


def told(heard: Heard) -> list[tuple[int, float, float]]:
    """Step, loss and rate of everything that was told, in order."""
    return [
        (event.first + index, loss, rate)
        for event in heard.steps()
        for index, (loss, rate) in enumerate(zip(event.losses, event.learning_rates, strict=True))
    ]


def test_every_step_is_reported_once_and_in_order(heard: Heard) -> None:
    own, count = reports(heard), 3 * STEPS_AT_ONCE + 7
    for step in range(count):
        own.add(batch(step), step * 0.5, step * 2.0)
    before = len(told(heard))
    own.flush()
    assert told(heard) == [(step, step * 0.5, step * 2.0) for step in range(count)]
    assert before >= 3 * STEPS_AT_ONCE, "loggers see steps while the training goes on"
    assert max(len(event.losses) for event in heard.steps()) == STEPS_AT_ONCE


def test_slow_steps_are_reported_after_some_seconds(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_logger, "STEPS_SECONDS", 0.0)
    own = reports(heard)
    for step in range(3):
        own.add(batch(step), 1.0, 0.1)
    assert len(told(heard)) == 3


def test_the_first_step_of_a_resumed_run_is_reported_at_once(heard: Heard) -> None:
    own = reports(heard)
    own.resume_from(5, None, 0.0, 0)
    own.add(batch(5), 1.0, 0.1)
    own.add(batch(6), 1.0, 0.1)
    assert [step for step, _, _ in told(heard)] == [5]


def test_the_loss_of_an_epoch_does_not_depend_on_the_reports(heard: Heard) -> None:
    losses = [1e16, *[0.75] * 6]  # to which it matters how many are added at once
    whole, cut = reports(heard), reports(heard)
    add_all(whole, losses)
    whole.flush()
    for step, loss in enumerate(losses):
        cut.add(batch(step), loss, 0.1)
        cut.flush()
    assert cut.epoch_loss() == whole.epoch_loss()


def test_a_late_loss_is_not_waited_for(heard: Heard) -> None:
    own, late = reports(heard), Late()
    losses: list[Any] = [*[1.0] * 20, late, *[1.0] * STEPS_AT_ONCE]
    for step, loss in enumerate(losses):
        own.add(batch(step), loss, 0.1)
    assert not late.is_ready
    assert [step for step, _, _ in told(heard)] == list(range(20))
    own.flush()
    assert told(heard)[20:22] == [(20, 4.0, 0.1), (21, 1.0, 0.1)]
    assert len(told(heard)) == len(losses)


def test_a_step_that_goes_on_after_a_report_is_reported_again(heard: Heard) -> None:
    own = reports(heard)
    for loss in (1.0, 3.0):
        own.add(batch(0), loss, 0.1, may_continue=True, continues=loss > 1)
    own.add(batch(1), 5.0, 0.1, may_continue=True)
    own.flush()
    own.add(batch(1), 7.0, 0.1, may_continue=True, continues=True)
    own.flush()
    assert told(heard) == [(0, 3.0, 0.1), (1, 5.0, 0.1), (1, 7.0, 0.1)]
    assert own.epoch_loss() == (3.0 + 7.0) / 2


def test_going_back_is_reported(heard: Heard) -> None:
    own = reports(heard)
    for step in (0, 1, 2, 0, 1):
        own.add(batch(step), 1.0, 0.1)
    own.flush()
    assert [step for step, _, _ in told(heard)] == [0, 1, 2, 0, 1]


def test_progress_has_the_newest_known_loss(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_logger, "PROGRESS_SECONDS", 0.0)
    own = reports(heard)
    for step, loss in enumerate([3.0, 2.0, Late()]):
        own.add(batch(step), loss, 0.1)
    progress = [event for event in heard.events if isinstance(event, Progress)]
    assert [(event.done, event.loss) for event in progress] == [(1, 3.0), (2, 2.0), (3, 2.0)]


def test_progress_ends_with_the_last_step(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_logger, "PROGRESS_SECONDS", 1e9)
    own = reports(heard)
    add_all(own, [3.0, 2.0, 1.0])
    own.finish()
    own.finish()
    progress = [event for event in heard.events if isinstance(event, Progress)]
    assert [(event.done, event.loss) for event in progress] == [(1, 3.0), (3, 1.0)]


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_nan_loss_stops_the_run_when_it_is_read(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The first progress event reads it, or the report of its block."""
    monkeypatch.setattr(step_logger, "PROGRESS_SECONDS", seconds)
    own, losses = reports(heard), [1.0] * 20 + [math.nan] * STEPS_AT_ONCE
    with pytest.raises(NotANumberError, match=r"step 20 is NaN .*\(of step 20\).*on_nan: warn"):
        add_all(own, losses)
    assert len(told(heard)) == (21 if seconds == 0.0 else 1 + STEPS_AT_ONCE)


def test_a_nan_loss_is_warned_of_once_or_ignored(heard: Heard) -> None:
    for action in ("warn", "ignore"):
        own = reports(heard, action)
        for step in range(3):
            own.add(batch(step), math.nan, 0.1)
            own.flush()
    warnings = [event for event in heard.events if isinstance(event, Warned)]
    assert ["step 0 is NaN" in event.text for event in warnings] == [True]
    assert len(told(heard)) == 6


def logged(heard: Heard) -> list[tuple[int, Any]]:
    """Step and values of every record of scalars that was reported, in order."""
    events = [event for event in heard.events if isinstance(event, Scalars)]
    return [pair for each in events for pair in zip(each.steps, each.values, strict=True)]


def test_scalars_are_read_when_steps_are_reported(heard: Heard) -> None:
    own, late = reports(heard), Late()
    own.add(batch(0), 1.0, 0.1)
    own.log(0, {"kl": 0.5})
    own.log(0, {"norm": late, "kl": 2.0})
    own.log(1, {"kl": 3.0})
    assert logged(heard) == []
    for step in range(1, STEPS_AT_ONCE + 1):
        own.add(batch(step), 1.0, 0.1)
    assert logged(heard) == [(0, {"kl": 0.5})], "what is late is not waited for"
    own.flush()
    assert logged(heard)[1:] == [(0, {"norm": 4.0, "kl": 2.0}), (1, {"kl": 3.0})]


def test_scalars_without_steps_are_reported_in_blocks(heard: Heard) -> None:
    own = reports(heard)
    for number in range(STEPS_AT_ONCE):
        own.log(0, {"kl": float(number)})
    assert len(logged(heard)) == STEPS_AT_ONCE


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps() -> None:
    own = reports(Heard(keep=False))
    used = []
    tracemalloc.start()
    try:
        for step in range(200_001):
            own.add(batch(step), step * 0.5, step * 2.0)
            if step in (20_000, 200_000):
                used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert used[1] - used[0] < 100_000, "a kept loss and rate a step would take 10 MB"
