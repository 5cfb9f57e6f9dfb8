"""What the processes of the tests of a host's reader do."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from unit.data.stream_samples import loader

from isotrain.core.data.arrays import InputsAndTargets
from isotrain.core.data.host_reader.host_reader import HostReader, SharedStream
from isotrain.core.data.sources import stream
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.data.workers.channel import Channel
from isotrain.core.errors import DataError

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
        reader = HostReader(secrets.token_hex(8), 1, start_seconds=60.0, timeout=0.5)
        reader.start(functools.partial(stuck, str(file)))
        with contextlib.suppress(DataError):
            list(loader(SharedStream("train", reader)))
        pid = int(file.read_text())
    channel.send({"pid": pid})
    channel.receive()


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
