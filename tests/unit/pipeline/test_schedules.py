"""Schedules of pipelines: what they need comes before, nobody waits for ever, little is kept."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest

from isotrain.core.pipeline.actions import (
    Action,
    Transfer,
    idle_share,
    needed,
    stage_actions,
    time_line,
)
from isotrain.core.pipeline.delayed_updates import (
    DelayedUpdates,
    StageVersions,
    delayed_updates,
    step_orders,
)
from isotrain.core.pipeline.executor import StageWork, execute_stage
from isotrain.core.pipeline.pipeline_plan import pipeline_plan
from isotrain.core.pipeline.profile import LayerCost, ModelProfile
from isotrain.core.pipeline.schedules import (
    SCHEDULES,
    Order,
    Pass,
    PipelineShape,
    pipeline_bubble,
    stage_orders,
)
from isotrain.plugin import PlanError

SHAPES = [
    (name, PipelineShape(stages, micro_batches, chunks))
    for name in SCHEDULES
    for stages in range(1, 7)
    for micro_batches in range(1, 13)
    for chunks in (range(1, 4) if name == "interleaved" else [1])
    if name != "interleaved" or micro_batches % stages == 0
]
"""Every schedule, with many numbers of stages, micro-batches and chunks."""
UNEQUAL = [
    (name, PipelineShape(len(processes), micro_batches, stage_processes=processes))
    for name in ("gpipe", "1f1b")
    for stages in (1, 2, 3)
    for processes in itertools.product((1, 2, 3), repeat=stages)
    for micro_batches in range(max(processes), 10)
]
"""Stages with several processes each, in many numbers."""


def assert_complete(found: list[Order], shape: PipelineShape) -> None:
    """Every micro-batch goes once forward and once backward through every chunk, on its own process."""
    processes = [(s, c, n) for s, n in enumerate(shape.processes) for c in range(n)]
    for (stage, copy, count), order in zip(processes, found, strict=True):
        expected = {
            Pass(direction, chunk, micro_batch)
            for direction in ("forward", "backward")
            for chunk in range(stage, shape.chunks, shape.stages)
            for micro_batch in range(copy, shape.micro_batches, count)
        }
        assert set(order) == expected
        assert len(order) == len(expected)
        for each in order:
            if each.direction == "backward":
                forward = Pass("forward", each.chunk, each.micro_batch)
                assert order.index(forward) < order.index(each)


def hand_over(found: list[list[Action]], shape: PipelineShape, waiting: bool) -> None:
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
def test_schedules_do_not_deadlock(name: str) -> None:
    """Every pass finds what it needs sent before, also where a sender waits for its receiver."""
    for schedule, shape in [*SHAPES, *UNEQUAL]:
        if schedule == name:
            found = stage_orders(name, shape)
            assert_complete(found, shape)
            for waiting in (True, False):
                hand_over(stage_actions(found), shape, waiting)


DELAYED = [
    PipelineShape(len(processes), micro_batches, stage_processes=processes)
    for stages in (1, 2, 3)
    for processes in itertools.product((1, 2, 3), repeat=stages)
    for micro_batches in (6, 12)
    if sum(processes) <= 6
] + [PipelineShape(4, 4), PipelineShape(4, 8)]


def three_steps(found: DelayedUpdates, shape: PipelineShape, drains: bool) -> list[list[Action]]:
    """Actions of each process in three steps and the rest; with `drains`, after each step the rest of it."""
    steps = [(0, found.fill), (1, found.steady), (2, found.steady), (3, found.drain)]
    if drains:
        steps = [
            (n, each)
            for step in range(3)
            for n, each in ((step, found.fill), (step + 1, found.drain))
        ]
    joined: list[list[Action]] = [[] for _ in found.fill]
    for step, each in steps:
        for actions, own in zip(each, joined, strict=True):
            assert all(action.micro_batch >= -shape.micro_batches for action in actions)
            first = shape.micro_batches * step
            own += [replace(a, micro_batch=a.micro_batch + first) for a in actions]
    return joined


@pytest.mark.parametrize("shape", DELAYED)
def test_steps_without_a_flush_do_each_pass_once_and_do_not_deadlock(shape: PipelineShape) -> None:
    """Three steps, then the rest: nobody waits for ever, and no more than two steps are in the pipeline."""
    found = delayed_updates("2bw", shape)
    joined = three_steps(found, shape, drains=False)
    three = replace(shape, micro_batches=3 * shape.micro_batches)
    passes = [[each for each in own if isinstance(each, Pass)] for own in joined]
    assert {each for own in passes for each in own} == {
        Pass(direction, stage, micro_batch)
        for direction in ("forward", "backward")
        for stage in range(shape.stages)
        for micro_batch in range(three.micro_batches)
    }
    hand_over(joined, three, waiting=False)
    orders = step_orders("2bw", shape)
    for actions, order in zip(found.steady, orders, strict=True):
        assert [each for each in actions if isinstance(each, Pass)] == order


@pytest.mark.parametrize("vertical_sync", [False, True])
@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize("shape", DELAYED)
def test_each_pass_finds_its_version(
    shape: PipelineShape, drains: bool, vertical_sync: bool
) -> None:
    """Nobody waits for ever where the processes of a stage update it together after each backward pass."""
    found = delayed_updates("pipedream", shape, vertical_sync)
    joined = three_steps(found, shape, drains)
    assert found.within_steps
    stages = [stage for stage, count in enumerate(shape.processes) for _ in range(count)]
    left = [deque(each) for each in joined]
    sent: set[Transfer] = set()
    in_exchange: set[int] = set()
    updates, most = [0] * shape.stages, [0] * shape.stages
    while any(left):
        moved = False
        for process, (stage, own) in enumerate(zip(stages, left, strict=True)):
            if not own or process in in_exchange:
                continue
            action = own[0]
            if isinstance(action, Transfer):
                if action.source == process:
                    sent.add(action)
                    if action.direction == "backward":
                        in_exchange.add(process)
                elif action not in sent:
                    continue
            else:
                age = updates[stage] - max(0, found.versions[stage].version(action.micro_batch))
                assert 0 <= age <= found.versions[stage].delay, f"{action} on process {process}"
                most[stage] = max(most[stage], age)
                if action.direction == "backward" and not stage:
                    in_exchange.add(process)
            own.popleft()
            moved = True
        for stage in range(shape.stages):
            members = {process for process, of in enumerate(stages) if of == stage}
            if members <= in_exchange:
                in_exchange -= members
                updates[stage] += 1
        assert moved, f"all wait: {[each[0] for each in left if each]}"
    assert most == [each.delay for each in found.versions]
    assert updates == [3 * shape.micro_batches // count for count in shape.processes]


@pytest.mark.parametrize(
    ("processes", "vertical_sync", "delays"),
    [
        ((1, 1), False, [1, 0]),
        ((1, 1, 1, 1), False, [3, 2, 1, 0]),
        ((1, 1, 1, 1), True, [3, 3, 3, 3]),
        ((2, 1, 1), False, [1, 1, 0]),
        ((2, 1, 1), True, [1, 3, 3]),
    ],
)
def test_the_staleness_is_that_of_the_paper(
    processes: tuple[int, ...], vertical_sync: bool, delays: list[int]
) -> None:
    shape = PipelineShape(len(processes), 4, stage_processes=processes)
    assert [
        each.delay for each in delayed_updates("pipedream", shape, vertical_sync).versions
    ] == delays
    assert [each.delay for each in delayed_updates("2bw", shape).versions] == [1] * len(processes)
    assert StageVersions(4, 4, 4).version(7) == 0


def test_stages_wait_less_without_a_flush() -> None:
    """Two need not wait if all passes take equally long; more do, because all learn the loss of a step."""
    for stages, micro_batches, share in ((2, 2, 0.0), (2, 8, 0.0), (3, 8, 1 / 17), (4, 8, 1 / 9)):
        shape = PipelineShape(stages, micro_batches)
        orders = step_orders("2bw", shape)
        assert idle_share(time_line(orders), stages) == pytest.approx(share)
        assert share <= pipeline_bubble(shape) / 2


def test_a_plan_without_a_flush_counts_both_versions_and_what_the_step_before_left() -> None:
    shape = PipelineShape(2, 4)
    found = pipeline_plan(equal_layers(shape), "2bw", shape, 2, 2, bandwidth=1e9)
    assert [stage.weight_versions for stage in found.stages] == [2, 2]
    assert [stage.gradient_versions for stage in found.stages] == [2, 2]
    stashed = pipeline_plan(equal_layers(shape), "pipedream", shape, 2, 2, bandwidth=1e9)
    assert [stage.weight_versions for stage in stashed.stages] == [2, 1]
    assert [stage.gradient_versions for stage in stashed.stages] == [1, 1]
    assert [stage.activation_bytes for stage in found.stages] == [20, 10]
    assert found.bubble == pytest.approx(
        1 / 13
    )  # after the last forward pass, one waits for the other
    assert [{*line} & {*"0123abcd"} for line in found.drawing] == [{*"0123abcd"}] * 2


def test_a_deadlocking_order_is_detected() -> None:
    """A stage there wants a gradient before it has sent the activation."""
    shape = PipelineShape(2, 2)
    first, last = stage_orders("1f1b", shape)
    first = [first[0], first[2], first[1], first[3]]
    assert first[1].direction == "backward"
    with pytest.raises(ValueError, match="waits for another"):
        time_line([first, [last[2], last[3], last[0], last[1]]])
    wrong = stage_actions([first, last])
    wrong[0].remove(next(each for each in wrong[0] if isinstance(each, Transfer)))
    with pytest.raises(AssertionError):
        hand_over(wrong, shape, waiting=False)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_as_predicted(name: str) -> None:
    """It is (p - 1) / (m + p - 1) of the time line; backward passes take twice as long as forward passes."""
    for schedule, shape in SHAPES:
        if schedule != name:
            continue
        line = time_line(
            stage_orders(name, shape), lambda each: 2.0 - (each.direction == "forward")
        )
        busy = 3.0 * shape.micro_batches * shape.chunks_per_stage
        length = max(each.end for each in line)
        assert 1 - busy / length == pytest.approx(pipeline_bubble(shape)), shape


def test_processes_of_a_stage_together_are_as_fast_as_one_of_another() -> None:
    """Once all work, a step takes as much longer for more micro-batches as the slowest stage does."""
    for processes in ((2, 1), (2, 1, 1), (1, 2)):

        def seconds(micro_batches: int, processes: tuple[int, ...] = processes) -> float:
            shape = PipelineShape(len(processes), micro_batches, stage_processes=processes)
            line = time_line(stage_orders("1f1b", shape), lambda each: float(processes[each.chunk]))
            return max(each.end for each in line)

        assert seconds(24) - seconds(12) == pytest.approx(2 * 12, rel=0.1), processes


def test_a_plan_draws_each_process_of_a_stage() -> None:
    shape = PipelineShape(2, 4, stage_processes=(2, 1))
    layers = [LayerCost("wide", 2.0, 4.0, 10, 3), LayerCost("narrow", 1.0, 2.0, 10, 3, (0,), 1)]
    found = pipeline_plan(ModelProfile(layers), "1f1b", shape, 2, 3, bandwidth=1e9)
    assert [stage.processes for stage in found.stages] == [2, 1]
    assert [stage.activation_bytes for stage in found.stages] == [20, 10]
    assert [set(line) & set("0123") for line in found.drawing] == [{*"02"}, {*"13"}, {*"0123"}]
    assert found.crossing_bytes == pytest.approx(20 / 3)


def equal_layers(shape: PipelineShape) -> ModelProfile:
    """A chain of one layer a chunk, each of which gives 10 bytes; backward passes take twice as long."""
    return ModelProfile(
        [
            LayerCost(f"layer_{n}", 1.0, 2.0, 10, 3, (n - 1,) if n else (), n)
            for n in range(shape.chunks)
        ]
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_draws_the_bubble_and_kept_activations(name: str) -> None:
    shape = PipelineShape(3, 6, 2 if name == "interleaved" else 1)
    orders = stage_orders(name, shape)
    found = pipeline_plan(equal_layers(shape), name, shape, 2, 3, bandwidth=1e9)
    assert found.bubble == pytest.approx(pipeline_bubble(shape))
    assert found.seconds == pytest.approx(
        3.0 * shape.micro_batches * shape.chunks_per_stage / (1 - found.bubble)
    )
    assert [stage.activation_bytes for stage in found.stages] == [
        10 * live(each) for each in orders
    ]
    assert [stage.slot_bytes for stage in found.stages] == [6 * shape.chunks_per_stage] * 3
    sent = [10 * shape.chunks_per_stage] * 3
    sent[-1] -= 10  # the last chunk sends nothing
    assert [stage.sent_bytes for stage in found.stages] == sent
    for line in found.drawing:
        assert line.count(".") / len(line) == pytest.approx(found.bubble, abs=0.06)
    assert found.balanced.seconds == 3.0
    assert found.best.seconds == pytest.approx(shape.chunks)  # replicas: little is sent


def test_a_plan_predicts_a_step_with_sends_and_exchange() -> None:
    """Passes take 1 and 2 s, a send over the cut 5 s, an exchange of 3 bytes between two processes 1.5 s."""
    shape = PipelineShape(2, 1)
    found = pipeline_plan(equal_layers(shape), "1f1b", shape, 0, 2, bandwidth=2.0)
    assert (found.seconds, found.step_seconds) == (6.0, 6.0 + 2 * 5.0)
    replicas = pipeline_plan(equal_layers(shape), "1f1b", shape, 0, 4, bandwidth=2.0)
    assert replicas.step_seconds == 6.0 + 2 * 5.0 + 1.5
    shape = PipelineShape(2, 3)
    slow = pipeline_plan(equal_layers(shape), "gpipe", shape, 0, 2, bandwidth=2.0)
    # a link sends one micro-batch after the other: 1 forward, 3 sends, 1 and 2 of the last, and so back
    assert slow.step_seconds == 1.0 + 3 * 5.0 + 1.0 + 2.0 + 3 * 5.0 + 2.0
    shape = PipelineShape(1, 4, stage_processes=(2,))
    for name, exchanges in (("1f1b", 1), ("2bw", 1), ("pipedream", 2)):
        found = pipeline_plan(equal_layers(shape), name, shape, 0, 2, bandwidth=2.0)
        assert found.step_seconds == 2 * (1.0 + 2.0) + exchanges * 1.5, name


@pytest.mark.parametrize("name", [*SCHEDULES, "2bw", "pipedream"])
def test_a_plan_predicts_a_step_with_loss_and_updates(name: str) -> None:
    """Each backward pass of the last chunk begins with the loss; updates come last, or after each pass."""
    shape = PipelineShape(2, 4, 2 if name == "interleaved" else 1)
    layers = equal_layers(shape).layers
    plain = pipeline_plan(ModelProfile(layers), name, shape, 0, 2, bandwidth=1e9)
    longer = [
        replace(each, backward=each.backward + 4.0 * (each.chunk == shape.chunks - 1))
        for each in layers
    ]
    with_loss = pipeline_plan(ModelProfile(layers, 4.0), name, shape, 0, 2, bandwidth=1e9)
    expected = pipeline_plan(ModelProfile(longer), name, shape, 0, 2, bandwidth=1e9)
    assert with_loss.step_seconds == expected.step_seconds
    assert with_loss.seconds == plain.seconds, "those of the layers"
    updated = ModelProfile([replace(each, update=1.0 + each.chunk) for each in layers])
    found = pipeline_plan(updated, name, shape, 0, 2, bandwidth=1e9)
    if name == "pipedream":
        longer = [replace(each, backward=each.backward + 1.0 + each.chunk) for each in layers]
        expected = pipeline_plan(ModelProfile(longer), name, shape, 0, 2, bandwidth=1e9)
        assert found.step_seconds == expected.step_seconds
        return
    ends = [0.0, 0.0]
    for each in time_line(
        step_orders(name, shape), lambda work: 2.0 - (work.direction == "forward")
    ):
        stage = each.work.chunk % 2
        ends[stage] = max(ends[stage], each.end)
    of_stages = (4.0, 6.0) if name == "interleaved" else (1.0, 2.0)
    last = max(end + update for end, update in zip(ends, of_stages, strict=True))
    assert found.step_seconds == pytest.approx(last, rel=1e-6)


def test_a_plan_counts_skip_connections() -> None:
    """The third stage needs the first layer's result too: the second passes it on."""
    shape, sources = PipelineShape(3, 3), [(), (0,), (0, 1)]
    layers = [LayerCost(str(n), 1.0, 1.0, 10**n, 1, own, n) for n, own in enumerate(sources)]
    found = pipeline_plan(ModelProfile(layers), "gpipe", shape, 0, 3, bandwidth=1.0)
    assert [stage.sent_bytes for stage in found.stages] == [1, 11, 0]


def live(order: Order) -> int:
    """The most forward passes of a stage whose backward pass is still to come: what it keeps."""
    now = most = 0
    for each in order:
        now += 1 if each.direction == "forward" else -1
        most = max(most, now)
    return most


def test_kept_activations() -> None:
    """gpipe keeps all; 1f1b as many as stages follow, and one; interleaved more of smaller chunks."""
    for name, shape in SHAPES:
        p, m, v = shape.stages, shape.micro_batches, shape.chunks_per_stage
        for stage, order in enumerate(stage_orders(name, shape)):
            ahead = 2 * (p - stage - 1) + (v - 1) * p
            expected = {"gpipe": m, "1f1b": min(m, p - stage), "interleaved": min(m * v, ahead + 1)}
            assert live(order) == expected[name]


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("1b1f", PipelineShape(2, 2), "did you mean '1f1b'|available|gpipe"),
        ("gpipe", PipelineShape(2, 2, 2), "Use schedule=interleaved"),
        ("interleaved", PipelineShape(2, 3, 2), "a multiple"),
        ("interleaved", PipelineShape(2, 2, 1, (2, 1)), r"received \(2, 1\). Use schedule=1f1b"),
        ("1f1b", PipelineShape(2, 2, 1, (1, 3)), "stage 2 has 3 processes for 2 micro-batches"),
        ("2bv", PipelineShape(2, 2), "Did you mean '2bw'"),
        ("2bw", PipelineShape(2, 2, 2), "Use schedule=interleaved"),
        ("2bw", PipelineShape(3, 1), "at least 2 micro-batches .* received 1"),
        ("2bw", PipelineShape(2, 3, 1, (2, 1)), "a multiple of 2 micro-batches .* received 3"),
    ],
)
def test_impossible_schedules_are_refused(name: str, shape: PipelineShape, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        step_orders(name, shape)


class Multiplied(StageWork):
    """Chunk c multiplies by c + 2; hands over by queues."""

    def __init__(self, queues: dict[tuple[int, int], Queue[Any]], shape: PipelineShape) -> None:
        self.queues, self.shape = queues, shape
        self.kept: dict[tuple[int, int], float] = {}
        self.gradients: Counter[int] = Counter()
        self.loss = 0.0

    def forward(self, work: Pass, received: list[Any]) -> list[Any]:
        value = received[0] if work.chunk else work.micro_batch + 1.0
        self.kept[work.chunk, work.micro_batch] = value
        if work.chunk < self.shape.chunks - 1:
            return [value * (work.chunk + 2)]
        self.loss += value * (work.chunk + 2)
        return []

    def backward(self, work: Pass, received: list[Any]) -> list[Any]:
        gradient = received[0] if work.chunk < self.shape.chunks - 1 else 1.0
        self.gradients[work.chunk] += gradient * self.kept.pop((work.chunk, work.micro_batch))
        return [gradient * (work.chunk + 2)]

    def send(self, transfer: Transfer, tensors: list[Any]) -> None:
        self.queues[transfer.source, transfer.destination].put(tensors)

    def receive(self, transfer: Transfer) -> list[Any]:
        return list(self.queues[transfer.source, transfer.destination].get(timeout=60))


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_compute_what_one_stage_does(name: str) -> None:
    """Only the order tells what arrives; every stage runs in a thread of its own."""
    shape = PipelineShape(3, 6, 2 if name == "interleaved" else 1)
    queues = {(a, b): Queue[Any]() for a in range(3) for b in range(3)}
    works = [Multiplied(queues, shape) for _ in range(3)]
    todo = stage_actions(stage_orders(name, shape))
    with ThreadPoolExecutor(3) as pool:
        taken = list(pool.map(execute_stage, todo, range(3), works))
    factors = [chunk + 2.0 for chunk in range(shape.chunks)]
    whole = math.prod(factors) * 21  # the sum of the micro-batches
    assert sum(work.loss for work in works) == whole
    found = sum((work.gradients for work in works), Counter())
    assert found == {chunk: whole / factor for chunk, factor in enumerate(factors)}
    assert not any(work.kept for work in works)
    assert all(queue.empty() for queue in queues.values())
    for stage, (actions, found) in enumerate(zip(todo, taken, strict=True)):
        assert [each.name for each in found] == [named(action, stage) for action in actions]
        times = [time for each in found for time in (each.begin, each.end)]
        assert times == sorted(times)


def named(action: Action, stage: int) -> str:
    if isinstance(action, Transfer):
        return "send" if action.source == stage else "wait"
    return action.direction
