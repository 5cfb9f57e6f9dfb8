"""Processes that read the shards of a stream for the reader of a host."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isotrain.core.data.streaming.shards import Chunk, ShardReader, ShardStart
from isotrain.core.data.workers.channel import Channel, ChannelClosedError
from isotrain.core.data.workers.child_process import VARIABLES, ChildProcess
from isotrain.core.errors import DataError

_CHUNKS_AHEAD = 2


class ShardProcesses:
    """Processes with some of a stream's shards each; they start with the first epoch."""

    def __init__(self, pickled: bytes, name: str, processes: int) -> None:
        """Starts nothing.

        Args:
            pickled: Pickled function that loads the streams by name.
            name: Name of the stream.
            processes: Number of processes.
        """
        self._pickled = pickled
        self._name = name
        self._processes = processes
        self._children: list[ChildProcess] = []
        self._epoch = 0
        self._chunks: list[deque[Chunk]] = []

    def begin(self, starts: Sequence[ShardStart]) -> None:
        """Starts an epoch of all shards; chunks of the one before are dropped as they arrive."""
        if not self._children:
            self._start()
        self._epoch += 1
        self._chunks = [deque() for _ in starts]
        for shard, (state, skipped) in enumerate(starts):
            request = {"epoch": self._epoch, "state": state, "skipped": skipped}
            self._send(shard, request)
            for _ in range(_CHUNKS_AHEAD):
                self._send(shard, {})

    def chunk(self, shard: int) -> Chunk:
        """The next samples of a shard that has not ended."""
        while not self._chunks[shard]:
            self._receive(shard)
        chunk = self._chunks[shard].popleft()
        if not chunk.is_last:
            self._send(shard, {})
        return chunk

    def _start(self) -> None:
        for _ in range(self._processes):
            child = ChildProcess.spawn(f"{__name__}:serve", VARIABLES, [self._name])
            child.channel.send({}, [np.frombuffer(self._pickled, np.uint8)])
            self._children.append(child)

    def _send(self, shard: int, request: dict[str, Any]) -> None:
        with contextlib.suppress(ChannelClosedError):  # seen when its answers are read
            self._child_of(shard).channel.send({"shard": shard, **request})

    def _receive(self, shard: int) -> None:
        """Waits for a chunk of any shard of the same process."""
        try:
            message = self._child_of(shard).channel.receive()
        except ChannelClosedError as error:
            end = self._child_of(shard).describe_end()
            raise DataError(
                f"data: the process that reads shard {shard} of the stream {end}."
            ) from error
        assert message is not None
        header = message.header
        if (text := header.get("error")) is not None:
            raise DataError(text)
        if header["epoch"] == self._epoch:
            pickled, *buffers = message.arrays
            samples = pickle.loads(pickled.data, buffers=buffers)  # noqa: S301 - by our child
            chunk = Chunk(samples, header["is_last"], header["state"])
            self._chunks[header["shard"]].append(chunk)

    def _child_of(self, shard: int) -> ChildProcess:
        return self._children[shard % self._processes]


def serve(channel: Channel, name: str) -> None:
    """Reads shards of a stream until the channel is closed."""
    message = channel.receive()
    assert message is not None
    readers: dict[int, ShardReader] = {}
    epoch = 0
    try:
        samples = pickle.loads(message.arrays[0].tobytes())()[name].shards  # noqa: S301 - by our parent
        for request in _requests(channel):
            shard = request["shard"]
            if shard not in readers:
                readers[shard] = samples.reader(shard)
            if "epoch" in request:
                epoch = request["epoch"]
                readers[shard].begin(request["state"], request["skipped"])
            else:
                _send_chunk(channel, {"epoch": epoch, "shard": shard}, readers[shard].chunk())
    except ChannelClosedError:
        return
    except Exception as error:  # user code may raise anything
        channel.send({"error": error_text(error)})


def error_text(error: Exception) -> str:
    """The message of an error of ours, or the traceback of another."""
    if isinstance(error, DataError):
        return str(error)
    text = "".join(traceback.format_exception(error)).rstrip()
    return f"data: the process that reads the stream raised {type(error).__name__}: {error}\n{text}"


def _requests(channel: Channel) -> Iterator[dict[str, Any]]:
    while True:
        message = channel.receive()
        assert message is not None
        yield message.header


def _send_chunk(channel: Channel, header: dict[str, Any], chunk: Chunk) -> None:
    import cloudpickle

    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(chunk.samples, protocol=5, buffer_callback=buffers.append)
    arrays = [np.frombuffer(pickled, np.uint8), *(np.asarray(each.raw()) for each in buffers)]
    channel.send({**header, "is_last": chunk.is_last, "state": chunk.state}, arrays)
