"""What Horovod and TensorFlow do in steps of real runs, as they and the kernel tell."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conformance import tcp_counters

import isotrain
from isotrain.core.planning.gpu_plan import counted_steps

Counts = dict[str, list[float]]
"""Number per step, and bytes per step, by the kind of a collective."""
_LATE_STEP = 600
_GROUP_MEMBER = re.compile(r"_\d+of\d+$")
_OPERATIONS = ("ALLREDUCE", "ALLGATHER", "ALLTOALL", "BROADCAST")
_KINDS = {
    "collective_reduce_v2": "all-reduce",
    "collective_gather_v2": "all-gather",
    "collective_bcast_send_v2": "send",
}
"""Kinds of TensorFlow's operations."""


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(256, 64)).astype("float32"), np.arange(256) % 10


def portable() -> Any:
    import keras

    first = keras.layers.Dense(512, activation="gelu", name="first")
    second = keras.layers.Dense(512, name="second")
    norm, last = keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(10, name="last")
    return keras.Sequential([keras.Input((64,)), first, second, norm, last])


SPEC: dict[str, Any] = {
    "model": portable,
    "data": data,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
    "global_batch_size": 64,
    "steps": 4,
}


def _steps(session: isotrain.Session) -> Iterator[None]:
    """Takes the first steps, and a period of them; yields; takes a period of steps again."""
    length = counted_steps(session.spec, session.strategy)
    period = range(_LATE_STEP, _LATE_STEP + length)
    take_steps(session, (*range(max(1, session.strategy.warm_up_steps) * length), *period))
    session.barrier()
    yield
    take_steps(session, period)
    session.group.synchronize_device()
    yield


def take_steps(session: isotrain.Session, steps: Iterable[int]) -> None:
    """Does the updates of steps with these numbers, all with the first batch."""
    batch, sections = session.next_batch(), session.spec.updates or {}
    assert batch is not None
    for step in steps:
        for name, update in session.updates.items():
            if name not in sections or sections[name].is_due(step, batch.epoch):
                update.step(replace(batch, step=step), 0.0)


def of_horovod(session: isotrain.Session, name: str) -> Counts | None:
    """Collectives of a period of steps by Horovod's timeline, which rank 0 writes; a group counts as one.

    The timeline has no bytes of all-to-alls.
    """
    hvd = importlib.import_module(f"horovod.{session.plan.framework}")
    path = session.run_directory / f"timeline-{name}.json"
    steps = _steps(session)
    next(steps)
    hvd.start_timeline(str(path))
    next(steps)
    hvd.stop_timeline()
    session.barrier()
    if not session.is_main:
        return None
    names: dict[int, str] = {}
    begun: dict[int, list[str]] = {}
    operations: set[tuple[str, str, int]] = set()
    nbytes: Counter[str] = Counter()
    times: Counter[int] = Counter()
    for event in json.loads(path.read_text()):
        lane = event["pid"]
        if event["name" if event["ph"] == "M" else "ph"] == "process_name":
            names[lane] = _GROUP_MEMBER.sub("", event["args"].get("name", ""))
        elif event["ph"] == "B":
            begun.setdefault(lane, []).append(event["name"])
        elif event["ph"] == "E" and begun.get(lane):  # else of a call before the timeline began
            kind = begun[lane].pop()
            if kind in _OPERATIONS:
                times[lane] += 1
                operations.add((kind, names[lane], times[lane]))
            if "args" in event:
                shape = json.loads(event["args"]["shape"].replace(", ]", "]"))
                nbytes[kind] += int(np.prod(shape)) * np.dtype(event["args"]["dtype"]).itemsize
    period = counted_steps(session.spec, session.strategy)
    counts = Counter(kind for kind, *_ in operations)
    return {kind: [counts[kind] / period, nbytes[kind] / period] for kind in counts}


def of_tensorflow(session: isotrain.Session, name: str) -> tuple[dict[str, float], float]:
    """Collectives per step that TensorFlow runs, and bytes that the kernel sees sent per step."""
    steps, period = _steps(session), counted_steps(session.spec, session.strategy)
    with _counting_collectives() as counters:
        next(steps)
        session.barrier()  # else another rank may not have got all of the step
        counts_before = {kind: int(counter) for kind, counter in counters.items()}
        before = tcp_counters.bytes_sent()
        next(steps)
        counts = {kind: int(counters[kind]) - counts_before[kind] for kind in counters}
        session.barrier()
        sent = tcp_counters.bytes_sent() - before
    return {kind: count / period for kind, count in counts.items() if count}, sent / period


def sent_to_workers(session: isotrain.Session) -> int:
    """Bytes that the kernel sees sent by rank 0 in a step of a parameter server."""
    take_steps(session, range(2))
    before = tcp_counters.bytes_sent()
    take_steps(session, [2])
    return tcp_counters.bytes_sent() - before


@contextlib.contextmanager
def _counting_collectives() -> Iterator[dict[str, Any]]:
    """Context in which functions that are traced add one to a variable whenever they run a collective.

    TensorFlow's profiler would tell too, but stopping it can abort a process with collectives.
    """
    import tensorflow as tf
    from tensorflow.python.ops import gen_collective_ops

    counters = {kind: tf.Variable(0, trainable=False, dtype=tf.int64) for kind in _KINDS.values()}

    def counted(operation: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with tf.control_dependencies([counters[kind].assign_add(1)]):
                return operation(*arguments, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name, kind in _KINDS.items():
            raw_name = "".join(map(str.capitalize, name.split("_")))
            for module, function in ((gen_collective_ops, name), (tf.raw_ops, raw_name)):
                patch.setattr(module, function, counted(getattr(module, function), kind))
        yield counters
