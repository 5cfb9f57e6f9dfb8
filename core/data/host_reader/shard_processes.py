"""Processes that read the shards of a stream for the reader of a host."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from isotrain.core.data.processes.channel import (
    Channel,
    ChannelClosedError,
    Message,
    error_text,
    received_object,
    send_object,
)
from isotrain.core.data.processes.child_process import VARIABLES, ChildProcess
from isotrain.core.data.streaming.shards import Chunk, ShardReader, ShardStart
from isotrain.core.errors import DataError

READER = "the process that reads the stream"
_CHUNKS_AHEAD = 2
_MOST_IN_FLIGHT = 64
"""Most requests that a process has not answered: all fit into a socket's buffer, so sending never waits."""


class ShardProcesses:
    """Processes with some of a stream's shards each; they start with the first epoch, or before it.

    Attributes:
        timeout: Seconds without a chunk after which a process hangs; None while samples are counted.
        children: The processes, once they have started.
    """

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
        self.timeout: float | None = None
        self.children: list[ShardProcess] = []
        self._chunks: dict[int, deque[Chunk]] = {}
        self._readings: dict[int, int] = {}  # how often each shard has begun

    def begin(self, shard: int, start: ShardStart) -> None:
        """Starts an epoch of a shard, and drops chunks of the one before."""
        if not self.children:
            self.start()
        self._chunks[shard] = deque()
        self._readings[shard] = reading = self._readings.get(shard, 0) + 1
        child = self.children[shard % self._processes]
        child.request({"shard": shard, "reading": reading, "start": start})
        for _ in range(_CHUNKS_AHEAD - 1):
            child.request({"shard": shard, "reading": reading})

    def chunk(self, shard: int) -> Chunk:
        """The next samples of a shard that has begun and not ended."""
        child = self.children[shard % self._processes]
        while not self._chunks[shard]:
            request, message = child.receive(self.timeout)
            if request["reading"] != self._readings[request["shard"]]:
                continue
            chunk = Chunk(
                received_object(message), message.header["is_last"], message.header["state"]
            )
            self._chunks[request["shard"]].append(chunk)
        chunk = self._chunks[shard].popleft()
        if not chunk.is_last:
            child.request({"shard": shard, "reading": self._readings[shard]})
        return chunk

    def start(self) -> None:
        """Starts the processes, which load the stream."""
        for _ in range(self._processes):
            arguments = [self._name, self._processes]
            child = ChildProcess.spawn(f"{__name__}:serve", VARIABLES, arguments)
            child.channel.send({}, [np.frombuffer(self._pickled, np.uint8)])
            self.children.append(ShardProcess(child))


class ShardProcess:
    """A process with some shards, of which it reads one chunk after the other, in the order of requests.

    Attributes:
        child: The process.
    """

    def __init__(self, child: ChildProcess) -> None:
        self.child = child
        self._due: deque[dict[str, Any]] = deque()  # requests that are not sent yet
        self._in_flight: deque[dict[str, Any]] = deque()  # those that are sent, and not answered

    def request(self, request: dict[str, Any]) -> None:
        """Requests a chunk of a `shard`, at the `start` of a reading or of one that has begun."""
        self._due.append(request)
        self._send_due()

    def receive(self, timeout: float | None) -> tuple[dict[str, Any], Message]:
        """Waits for the next chunk; returns its request, and the message that has it.

        Raises:
            DataError: The process has ended or hangs, or its stream has raised.
        """
        shard = self._in_flight[0]["shard"]
        try:
            message = self.child.channel.receive(timeout)
        except ChannelClosedError as error:
            end = self.child.describe_end()
            raise DataError(
                f"data: the process that reads shard {shard} of the stream {end}."
            ) from error
        if message is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child.pid, signal.SIGUSR1)
            raise DataError(
                f"data: the process that reads shard {shard} of the stream (pid {self.child.pid}) has not"
                f" answered for {timeout:g} s; its stack is in the log of the first rank of this host"
            )
        if (text := message.header.get("error")) is not None:
            raise DataError(text)
        request = self._in_flight.popleft()
        self._send_due()
        return request, message

    def _send_due(self) -> None:
        while self._due and len(self._in_flight) < _MOST_IN_FLIGHT:
            self._in_flight.append(self._due.popleft())
            with contextlib.suppress(ChannelClosedError):  # seen when its answers are read
                self.child.channel.send(self._in_flight[-1])


def serve(channel: Channel, name: str, processes: int) -> None:
    """Reads shards of a stream, as one of so many processes, until the channel is closed."""
    message = channel.receive()
    assert message is not None
    try:
        samples = pickle.loads(message.arrays[0].tobytes())()[name].shards  # noqa: S301 - by our parent
        readers: dict[int, ShardReader] = {}
        for request in _requests(channel):
            shard = request["shard"]
            if shard not in readers:
                readers[shard] = samples.reader(shard, processes)
            if "start" in request:
                readers[shard].begin(*request["start"])
            chunk = readers[shard].chunk()
            send_object(channel, {"is_last": chunk.is_last, "state": chunk.state}, chunk.samples)
    except ChannelClosedError:
        return
    except Exception as error:  # user code may raise anything
        channel.send({"error": error_text(error, READER)})


def _requests(channel: Channel) -> Iterator[dict[str, Any]]:
    while True:
        message = channel.receive()
        assert message is not None
        yield message.header
