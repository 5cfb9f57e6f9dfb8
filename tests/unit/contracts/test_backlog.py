"""Events that wait for a slow reader: in order, bounded, and with a word on what was left out."""

from __future__ import annotations

from isotrain.core.contracts.events import (
    EpochEnded,
    Event,
    Output,
    Progress,
    Scalars,
    Steps,
    Warned,
)
from isotrain.core.contracts.reporter import EventQueue


def progress(done: int) -> Progress:
    return Progress(done=done, total=9, epoch=0, loss=0.5, samples_per_s=None)


def steps(first: int, count: int) -> Steps:
    return Steps(first=first, losses=[0.5] * count, learning_rates=[0.1] * count)


EPOCH = EpochEnded(metrics={}, epoch=0, done=9, loss=0.5)


def through(backlog: EventQueue[Event], *events: Event) -> list[Event]:
    """What comes out once all are in."""
    for event in events:
        backlog.add(event, event.kind, vars(event))
    return list(iter(backlog.take, None))


def test_only_the_newest_of_consecutive_progress_is_kept() -> None:
    given = [progress(1), progress(2), steps(0, 2), progress(3), progress(4)]
    backlog = EventQueue[Event](lambda text: Warned(text=text))
    assert through(backlog, *given) == [progress(2), steps(0, 2), progress(4)]


def test_dropped_events_are_counted_in_their_place() -> None:
    backlog = EventQueue[Event](lambda text: Warned(text=text), most_bytes=1000)
    logged = Scalars(steps=[20], values=[{"kl": 0.5, "norm": 2.0}])
    given = [steps(0, 20), steps(20, 3), Output(text="x"), progress(23), EPOCH, steps(23, 4)]
    assert through(EventQueue(str, most_bytes=1000), *given[:1], logged)[1] == (
        "the reader was too slow: 0 steps, 2 logged scalars and 0 pieces of output were dropped here"
    )
    first, gap, epoch, last = through(backlog, *given)
    assert (first, epoch) == (steps(0, 20), EPOCH)
    left_out = "the reader was too slow: {} steps and {} pieces of output were dropped here"
    assert gap == Warned(text=left_out.format(3, 1))
    assert last == Warned(text=left_out.format(4, 0))
    assert through(backlog, steps(27, 1)) == [steps(27, 1)], "there is room again"
