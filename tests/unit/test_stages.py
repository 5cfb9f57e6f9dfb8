"""Schedules of pipelines: what they need comes before, nobody waits for ever, little is kept."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from isotrain.core.stages.actions import Action, Transfer, actions, needed, time_line
from isotrain.core.stages.schedules import (
    SCHEDULES,
    Order,
    Pass,
    Shape,
    bubble,
    live,
    orders,
)
from isotrain.plugin import PlanError

SHAPES = [
    (name, Shape(stages, micro_batches, chunks))
    for name in SCHEDULES
    for stages in range(1, 7)
    for micro_batches in range(1, 13)
    for chunks in (range(1, 4) if name == "interleaved" else [1])
    if name != "interleaved" or micro_batches % stages == 0
]
"""Every schedule, with many numbers of stages, micro-batches and chunks."""


def assert_complete(found: list[Order], shape: Shape) -> None:
    """Every micro-batch goes once forward and once backward through every chunk, on its own stage."""
    for stage, order in enumerate(found):
        expected = {
            Pass(direction, chunk, micro_batch)
            for direction in ("forward", "backward")
            for chunk in range(stage, shape.chunks, shape.stages)
            for micro_batch in range(shape.micro_batches)
        }
        assert set(order) == expected
        assert len(order) == len(expected)
        for each in order:
            if each.direction == "backward":
                forward = Pass("forward", each.chunk, each.micro_batch)
                assert order.index(forward) < order.index(each)


def hand_over(found: list[list[Action]], shape: Shape, waiting: bool) -> None:
    """Does all actions of all stages; `waiting`: whoever sends waits for the receiver."""
    left = [deque(each) for each in found]
    done: set[Pass] = set()
    sent: Counter[Transfer] = Counter()
    while any(left):
        moved = False
        for stage, actions_left in enumerate(left):
            if not actions_left:
                continue
            action = actions_left[0]
            if isinstance(action, Pass):
                before = needed(action, shape.chunks)
                assert before is None or before in done, f"{action} without {before}"
                done.add(action)
            elif action.source == stage:
                other = left[action.destination]
                if waiting and not (other and other[0] == action):
                    continue
                sent[action] += 1
            elif not sent[action]:
                continue
            actions_left.popleft()
            moved = True
        assert moved, f"all wait: {[each[0] for each in left if each]}"
    assert len(done) == 2 * shape.chunks * shape.micro_batches


@pytest.mark.parametrize("name", SCHEDULES)
def test_nobody_waits_for_ever(name: str) -> None:
    """What a pass needs was sent before, also where a sender waits for its receiver."""
    for schedule, shape in SHAPES:
        if schedule == name:
            found = orders(name, shape)
            assert_complete(found, shape)
            for waiting in (True, False):
                hand_over(actions(found), shape, waiting)


def test_a_wrong_order_is_found() -> None:
    """The tests above see one: a stage that wants a gradient before it has sent what that is of."""
    shape = Shape(2, 2)
    first, last = orders("1f1b", shape)
    first = [first[0], first[2], first[1], first[3]]
    assert first[1].direction == "backward"
    with pytest.raises(ValueError, match="waits for another"):
        time_line([first, [last[2], last[3], last[0], last[1]]])
    wrong = actions([first, last])
    wrong[0].remove(next(each for each in wrong[0] if isinstance(each, Transfer)))
    with pytest.raises(AssertionError):
        hand_over(wrong, shape, waiting=False)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_what_is_predicted(name: str) -> None:
    """(p - 1) / (m + p - 1) of the time line, where backward passes take twice as long as forward passes."""
    for schedule, shape in SHAPES:
        if schedule != name:
            continue
        line = time_line(orders(name, shape), lambda each: 2.0 - (each.direction == "forward"))
        busy = 3.0 * shape.micro_batches * shape.chunks_per_stage
        length = max(each.end for each in line)
        assert 1 - busy / length == pytest.approx(bubble(shape)), shape


def test_activations_that_are_kept() -> None:
    """All with gpipe; with 1f1b as many as stages follow, and one; interleaved, more of smaller chunks."""
    for name, shape in SHAPES:
        p, m, v = shape.stages, shape.micro_batches, shape.chunks_per_stage
        for stage, order in enumerate(orders(name, shape)):
            ahead = 2 * (p - stage - 1) + (v - 1) * p
            expected = {"gpipe": m, "1f1b": min(m, p - stage), "interleaved": min(m * v, ahead + 1)}
            assert live(order) == expected[name]


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("1b1f", Shape(2, 2), "did you mean '1f1b'|available|gpipe"),
        ("gpipe", Shape(2, 2, 2), "Take schedule=interleaved"),
        ("interleaved", Shape(2, 3, 2), "a multiple"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, shape: Shape, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        orders(name, shape)
