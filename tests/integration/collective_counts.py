"""What Horovod and TensorFlow do in steps of real runs, as they and the kernel tell."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from conformance import tcp_counters

import isotrain

Counts = dict[str, list[float]]
"""Number per step, and bytes per step, by the kind of a collective."""
_LATE_STEP = 600
_GROUP_MEMBER = re.compile(r"_\d+of\d+$")
_KERNEL = re.compile(r"^[^:]*:(Collective\w+)V\d$")
_OPERATIONS = ("ALLREDUCE", "ALLGATHER", "ALLTOALL", "BROADCAST")
_KINDS = {
    "CollectiveReduce": "all-reduce",
    "CollectiveGather": "all-gather",
    "CollectiveBcastSend": "send",
}


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(256, 64)).astype("float32"), np.arange(256) % 10


def portable() -> Any:
    import keras

    layers = [keras.layers.Dense(512, activation="gelu"), keras.layers.Dense(512)]
    last = [keras.layers.BatchNormalization(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *layers, *last])


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
    batch, strategy = session.next_batch(), session.strategy
    assert batch is not None
    period = range(_LATE_STEP, _LATE_STEP + strategy.period)
    for step in (*range(max(1, strategy.warm_up_steps)), *period):
        strategy.step(session.group, replace(batch, step=step), 0.0)
    session.barrier()
    yield
    for step in period:
        strategy.step(session.group, replace(batch, step=step), 0.0)
    session.group.synchronize_device()
    yield


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
    period = session.strategy.period
    counts = Counter(kind for kind, *_ in operations)
    return {kind: [counts[kind] / period, nbytes[kind] / period] for kind in counts}


def of_tensorflow(session: isotrain.Session, name: str) -> tuple[dict[str, float], float]:
    """Collectives per step that TensorFlow's profiler sees, and bytes that the kernel sees sent per step."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    steps, period = _steps(session), session.strategy.period
    next(steps)
    folder = session.run_directory / f"profile-{session.rank}-{name}"
    before = tcp_counters.bytes_sent()
    tf.profiler.experimental.start(str(folder))
    next(steps)
    tf.profiler.experimental.stop()
    sent = tcp_counters.bytes_sent() - before
    session.barrier()
    (path,) = folder.rglob("*.xplane.pb")
    names: Counter[str] = Counter()
    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
        for line in plane.lines:
            names.update(plane.event_metadata[event.metadata_id].name for event in line.events)
    matches = {each: match[1] for each in names if (match := _KERNEL.match(each))}
    counts: Counter[str] = Counter()
    for each, kernel in matches.items():
        if kernel in _KINDS:
            counts[_KINDS[kernel]] += names[each]
    return {kind: count / period for kind, count in counts.items()}, sent / period
