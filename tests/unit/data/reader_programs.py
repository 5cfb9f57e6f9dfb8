"""What the processes of the tests of a host's reader do."""

from __future__ import annotations

import functools
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from helpers.waiting import wait_until
from unit.data.stream_samples import loader

from isotrain.core.data.arrays import InputsAndTargets
from isotrain.core.data.host_reader.host_reader import HostReader, SharedStream
from isotrain.core.data.processes.channel import Channel
from isotrain.core.data.sources import sample_stream, stream
from isotrain.core.data.streaming.streams import BatchStream

INPUTS = np.arange(40, dtype=np.float32).reshape(20, 2)
TARGETS = np.arange(20)


class Noting:
    """Batches of uneven sizes with a state; notes each batch in a file."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.first = self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["position"]

    def __iter__(self) -> Iterator[InputsAndTargets]:
        self.position, self.first = self.first, 0
        for start in range(self.position, 20, 3):
            self.position = stop = min(20, start + 3)
            with self.file.open("a") as lines:
                lines.writelines(f"{row}\n" for row in range(start, stop))
            yield INPUTS[start:stop], {"class": TARGETS[start:stop], "half": INPUTS[start:stop] / 2}


def noting(file: str, samples: int | None = 20) -> dict[str, BatchStream]:
    """One stream."""
    return {"train": stream(Noting(file), samples)}


def raising() -> Iterator[InputsAndTargets]:
    """Raises after a batch."""
    yield INPUTS[:8], TARGETS[:8]
    raise RuntimeError("a broken shard")


def killed() -> Iterator[InputsAndTargets]:
    """Ends its process after a batch."""
    yield INPUTS[:8], TARGETS[:8]
    os.kill(os.getpid(), signal.SIGKILL)


class Stuck:
    """Batches of a pipe into which nobody writes any more; its second element tells who reads."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def __call__(self) -> Iterator[InputsAndTargets]:
        waiting, _ = os.pipe()
        yield INPUTS[:8], TARGETS[:8]
        self.file.write_text(str(os.getpid()))
        os.read(waiting, 1)


def stuck(file: str) -> dict[str, BatchStream]:
    """A stream that gives one batch, and then waits for ever."""
    return {"train": stream(Stuck(file), 20)}


def starter_of_stuck(channel: Channel) -> None:
    """Starts a reader, and tells its process id once it is stuck."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pid"
        reader = HostReader(secrets.token_hex(8), 1, [0], start_seconds=60.0, timeout=300.0)
        reader.start(functools.partial(stuck, str(file)))
        batches = loader(SharedStream("train", reader))
        threading.Thread(target=list, args=(batches,), daemon=True).start()
        pid = int(wait_until(lambda: file.exists() and file.read_text(), 60.0))
    channel.send({"pid": pid})
    channel.receive()


class Counting:
    """Numbers of a shard, which has a state; from 100 times its index on."""

    def __init__(self, shard: int, count: int) -> None:
        self.first, self.count, self.done, self.resumed = 100 * shard, count, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed = state["done"]

    def __iter__(self) -> Iterator[Any]:
        self.done, self.resumed = self.resumed, 0
        while self.done < self.count:
            self.done += 1
            number = self.first + self.done - 1
            yield np.full(2000, number, np.float32), np.array(number)


COUNTS = (40, 7, 30)


def counted_shard(shard: int, shards: int) -> Any:
    """A shard of uneven length."""
    assert shards == len(COUNTS)
    return iter(Counting(shard, COUNTS[shard]))


def asking(*, asks: bool = True) -> Any:
    """The same numbers, as a data set of torch, which is imported here: few readers need it."""
    from unit.data.torch_shards import CountedShards

    return CountedShards(asks=asks)


def counted(kind: str) -> dict[str, BatchStream]:
    """A stream in three shards."""
    data = {
        "function": lambda: counted_shard,
        "asking": asking,
        "deaf": functools.partial(asking, asks=False),
        "killed": lambda: killed_shard,
        "raising": lambda: raising_shard,
        "hanging": lambda: hanging_shard,
    }[kind]()
    return {"train": sample_stream(data, samples=sum(COUNTS), shards=len(COUNTS))}


def scheduled(folder: str) -> dict[str, BatchStream]:
    """The same as `counted("asking")` with known lengths; the shards that are read are noted as files."""

    def shard(index: int, shards: int) -> Iterator[Any]:
        (Path(folder) / str(index)).touch()
        yield from counted_shard(index, shards)

    return {"train": sample_stream(shard, samples=COUNTS)}


def killed_shard(shard: int, shards: int) -> Iterator[Any]:
    """Ends its process after some samples of shard 1."""
    for number, sample in enumerate(Counting(shard, COUNTS[shard])):
        yield sample
        if shard == 1 and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def hanging_shard(shard: int, shards: int) -> Iterator[Any]:
    """Waits for ever after some samples of shard 1."""
    for number, sample in enumerate(Counting(shard, COUNTS[shard])):
        yield sample
        if shard == 1 and number == 5:
            waiting, _ = os.pipe()
            print("shard 1 hangs", file=sys.stderr, flush=True)
            os.read(waiting, 1)


def raising_shard(shard: int, shards: int) -> Iterator[Any]:
    """Raises after some samples of shard 1."""
    for number, sample in enumerate(Counting(shard, COUNTS[shard])):
        yield sample
        if shard == 1 and number == 5:
            raise RuntimeError("a broken shard")


def batched_shard(shard: int, shards: int) -> Iterator[Any]:
    """The numbers of a shard in batches of 4, of which the last one is smaller."""
    samples = list(counted_shard(shard, shards))
    for start in range(0, len(samples), 4):
        inputs, numbers = zip(*samples[start : start + 4], strict=True)
        yield np.stack(inputs), np.array(numbers)


def batched() -> dict[str, BatchStream]:
    """A stream of batches in three shards."""
    return {"train": stream(batched_shard, sum(COUNTS), shards=len(COUNTS))}


MANY = 600
"""Shards of a stream, far more than a socket's buffer holds messages."""


def many() -> dict[str, BatchStream]:
    """A stream in many shards of three samples each."""

    def shard(index: int, shards: int) -> Iterator[Any]:
        for number in range(index, 3 * shards, shards):
            yield np.full(2, number, np.float32), np.array(number)

    return {"train": sample_stream(shard, samples=3 * MANY, shards=MANY)}


def ranks() -> Iterator[InputsAndTargets]:
    """Gives the variables by which libraries take shards."""
    count = len({"RANK", "WORLD_SIZE"} & set(os.environ))
    while True:
        yield np.full((8, 2), count, np.float32), TARGETS[:8]


def named(name: str) -> dict[str, BatchStream]:
    """One of the streams above."""
    return {"train": stream({"raising": raising, "killed": killed, "ranks": ranks}[name], 20)}


def unloadable() -> dict[str, BatchStream]:
    """Raises."""
    raise FileNotFoundError("no such shard")
