"""The work of every process of a comparison's run: timed training."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from isotrain.core.contracts.backend.group_protocols import ActionTimingGroup
from isotrain.core.contracts.backend.step_actions import step_actions
from isotrain.core.contracts.job import InternalWork
from isotrain.core.system.process import peak_memory_bytes

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.replica import Tensor
    from isotrain.core.data.batch import Batch
    from isotrain.core.session.session import Session

_TIMELINE_STEPS = 9
_EXCHANGE_SECONDS = 0.5
_MAX_EXCHANGES = 20
_MIN_EXCHANGES = 3


@dataclass(frozen=True)
class Measurement(InternalWork):
    """A run's measurement; called with the session on every process. Collective.

    Attributes:
        steps: Number of first training steps whose losses are kept.
        evaluate: Whether to evaluate after these steps, if the spec has validation data.
        blocks: Number of steady blocks after which to stop.
        block_seconds: Target duration of a block in seconds.
        seconds: Limit of all blocks in seconds, for runs that are slow or do not become steady.
    """

    name: ClassVar[str] = "measure"
    steps: int
    evaluate: bool
    blocks: int
    block_seconds: float
    seconds: float

    def __call__(self, session: Session) -> dict[str, Any]:
        """Measures; returns plain values, different on each process."""
        session.disable_progress_reports()
        feed = _Feed(session)
        steps = min(self.steps, session.total_steps)
        losses, (first_step, first_step_time), opening = _first_steps(feed, steps)
        metrics = self._metrics(session)
        timer = _Timer(feed)
        warm_up = _calibrated(timer, self.block_seconds)
        blocks, steady = self._blocks(timer)
        memory = peak_memory_bytes()
        return {
            "losses": [float(loss) for loss in losses],
            "metrics": metrics,
            "first_step_at": first_step,
            "first_step_time": first_step_time,
            "opening_s": opening,
            "opening_steps": steps,
            "warm_up": _columns(warm_up),
            "blocks": _columns(blocks),
            "steady_state_start": steady,
            "block_steps": timer.steps,
            "peak_memory_bytes": memory,
            "timeline": _timeline(feed, _step_seconds(blocks, steady)),
            "all_reduce_s": _all_reduce_seconds(session),
            "plan": session.plan.to_dict(),
            "versions": session.versions,
        }

    def _metrics(self, session: Session) -> dict[str, float]:
        """Training and validation metrics after the first steps, by name; not timed."""
        metrics = session.metrics() if session.spec.metrics else {}
        if self.evaluate and session.can_evaluate:
            evaluated = session.evaluate()
            metrics |= {f"validation_{name}": value for name, value in evaluated.items()}
        return metrics

    def _blocks(self, timer: _Timer) -> tuple[list[_Block], int | None]:
        """Times blocks until enough are steady or the limit has passed; with the first steady index."""
        from isotrain.analysis.compare.measurement.statistics import steady_state_start

        blocks: list[_Block] = []
        began = time.perf_counter()
        while True:
            blocks.append(timer.block())
            start = steady_state_start([block.seconds / block.samples for block in blocks])
            enough = start is not None and len(blocks) - start >= self.blocks
            late = time.perf_counter() - began > self.seconds
            if _agreed(timer.session, int(enough or late)):
                return blocks, start


def _first_steps(feed: _Feed, steps: int) -> tuple[list[Tensor], tuple[float, float], float]:
    """Takes the first steps; returns scalar losses, end of the first step on two clocks, total seconds."""
    group = feed.session.group
    began = time.perf_counter()
    losses = [feed.step()[1]]
    group.synchronize_device()
    # The monotonic clock, which all processes of a machine share, and Unix time, which events have.
    first = time.monotonic(), time.time()
    losses += [feed.step()[1] for _ in range(steps - 1)]
    group.synchronize_device()
    return losses, first, time.perf_counter() - began


class _Feed:
    """Trains step after step, and starts over at the end of the run.

    Attributes:
        session: Training session.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._batches: Iterator[Batch] = session.batches()

    def batch(self) -> Batch:
        """The next batch."""
        batch = next(self._batches, None)
        if batch is None:
            self.session.seek(0)
            self._batches = self.session.batches()
            batch = next(self._batches)
        return batch

    def step(self) -> tuple[int, Tensor]:
        """Trains on the next batch; returns its global batch size and its mean loss (scalar)."""
        batch = self.batch()
        return batch.size, self.session.step(batch)


@dataclass(frozen=True)
class _Block:
    """Consecutive steps timed together, the device synchronised at both ends."""

    steps: int
    samples: int
    seconds: float
    cpu_s: float


def _columns(blocks: list[_Block]) -> dict[str, list[float]]:
    names = [field.name for field in dataclasses.fields(_Block)]
    return {name: [getattr(block, name) for block in blocks] for name in names}


class _Timer:
    """Times blocks of `steps` steps."""

    def __init__(self, feed: _Feed) -> None:
        self.session = feed.session
        self.steps = 1
        self._feed = feed

    def block(self) -> _Block:
        """Times one block. Collective."""
        group, steps, step = self.session.group, self.steps, self._feed.step
        samples = 0
        group.synchronize_device()
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(steps):
            samples += step()[0]
        group.synchronize_device()
        return _Block(steps, samples, time.perf_counter() - began, time.process_time() - cpu)


def _step_seconds(blocks: Sequence[_Block], steady: int | None) -> float:
    """Median seconds of a step over the steady blocks."""
    from statistics import median

    start = len(blocks) // 2 if steady is None else steady
    return median(block.seconds / block.steps for block in blocks[start:])


def _calibrated(timer: _Timer, seconds: float) -> list[_Block]:
    """Sets the timer's steps per block to match a duration; returns the blocks timed meanwhile."""
    tried: list[_Block] = []
    while True:
        tried.append(timer.block())
        taken = tried[-1].seconds
        factor = min(8.0, seconds / max(taken, 1e-9))
        wanted = max(1, math.ceil(timer.steps * factor))
        is_near = taken > seconds / 2 and len(tried) > 1
        timer.steps = _agreed(timer.session, wanted)
        if _agreed(timer.session, int(is_near or (wanted == 1 and len(tried) > 1))):
            return tried


def _agreed(session: Session, value: int) -> int:
    """Broadcasts a non-negative integer from rank 0, by a max all-reduce. Collective."""
    if session.group.is_single_process or session.plan.uses_parameter_server:
        return value
    return int(session.group.all_reduce_max([float(value if session.is_main else 0)])[0])


StepSpan = tuple[str, float, float]
"""A span of a step: name, start and duration in seconds."""


def _timeline(feed: _Feed, step_s: float) -> list[StepSpan]:
    """The spans of one step, the same on all processes: on rank 0 its length is nearest to `step_s`.

    The device is synchronised before and after each step.
    """
    if isinstance(feed.session.group, ActionTimingGroup):
        feed.session.group.set_action_timing(True)
    steps = [_step_spans(feed) for _ in range(_TIMELINE_STEPS)]
    apart = [abs(sum(spans[-1][1:]) - step_s) for spans in steps]
    return steps[_agreed(feed.session, apart.index(min(apart)))]


def _step_spans(feed: _Feed) -> list[StepSpan]:
    """The spans of one step: input, the step or its actions, remaining device work."""
    group, session = feed.session.group, feed.session
    group.synchronize_device()
    began = time.perf_counter()
    batch = feed.batch()
    fed = time.perf_counter()
    session.step(batch)
    stepped = time.perf_counter()
    group.synchronize_device()
    ended = time.perf_counter()
    actions = [(each.name, each.begin, each.end) for each in step_actions(group, fed, stepped)]
    times = [("input", began, fed), *actions, ("device", stepped, ended)]
    return [(name, begin - began, end - begin) for name, begin, end in times]


def _all_reduce_seconds(session: Session) -> float | None:
    """Median seconds of a sum all-reduce of the gradient's size on the backend. Collective."""
    import numpy as np

    group, size = session.group, session.plan.gradient_bytes
    if group.replicas == 1 or session.plan.uses_parameter_server or not size:
        return None
    kind = np.dtype(np.float64 if session.spec.precision == "float64" else np.float32)
    count = -(-size // kind.itemsize)
    values = [group.tensor(np.full(count, replica + 1, kind)) for replica in group.local_replicas]

    def once() -> float:
        session.barrier()
        group.synchronize_device()
        began = time.perf_counter()
        group.all_reduce(values, "sum")
        group.synchronize_device()
        return time.perf_counter() - began

    once()  # the first one may compile
    wanted = int(_EXCHANGE_SECONDS / max(once(), 1e-9))
    rounds = _agreed(session, min(max(wanted, _MIN_EXCHANGES), _MAX_EXCHANGES))
    return float(np.median([once() for _ in range(rounds)]))
