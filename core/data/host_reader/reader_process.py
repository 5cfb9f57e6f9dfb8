"""The main program of a host's reader."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isotrain.core.data.host_reader.host_reader import BATCHES_AHEAD, peer_pid, socket_address
from isotrain.core.data.host_reader.shard_processes import READER, ShardProcesses
from isotrain.core.data.processes.channel import Channel, ChannelClosedError, error_text
from isotrain.core.data.pytree import encode_tree, map_parts
from isotrain.core.data.streaming.stream_epoch import ReadCount
from isotrain.core.data.streaming.stream_reader import (
    GlobalBatch,
    RowsOf,
    StreamCut,
    global_batches,
)
from isotrain.core.data.streaming.stream_state import StreamState
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.system.process import poll_readable

_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
)
"""Variables by which libraries of streams would take a shard for one process."""
_NOT_SENT = object()


class _Reading:
    """One reading of a stream, from a step on, which every process of the host takes part in once.

    Attributes:
        batches: Global batches by step that a process may still request.
        next_step: Step of the next batch to read.
        has_ended: Whether there is no further batch.
        error: Text of the error that ended it, or None.
        pids: Processes that take or took part.
        clients: Those that take part now.
        count: Count of what was read of the stream.
    """

    def __init__(
        self, key: Any, step: int, batches: Iterator[GlobalBatch], count: ReadCount
    ) -> None:
        self.key = key
        self.count = count
        self.batches: dict[int, GlobalBatch] = {}
        self.next_step = step
        self.has_ended = False
        self.error: str | None = None
        self.pids: set[int] = set()
        self.clients: list[_Client] = []
        self._iterator = batches

    def read(self) -> None:
        """Reads the next global batch."""
        try:
            self.batches[self.next_step] = next(self._iterator)
            self.next_step += 1
        except StopIteration:
            self.has_ended = True
        except Exception as error:  # user code may raise anything
            self.has_ended, self.error = True, error_text(error, READER)

    def forget(self, processes: int) -> None:
        """Drops the batches that no process will request any more."""
        if len(self.pids) < processes:
            return
        first = min((client.step for client in self.clients), default=self.next_step)
        for step in [step for step in self.batches if step < first]:
            del self.batches[step]

    def is_due(self) -> bool:
        """Whether the next batch is to be read: a process waits for it, or will soon."""
        if self.has_ended or not self.clients:
            return False
        return self.next_step < max(client.step for client in self.clients) + BATCHES_AHEAD


@dataclass
class _Client:
    """A process's connection.

    Attributes:
        channel: Channel to it.
        reading: What it takes part in; None before its request.
        rows_of: Function from the size of a global batch to the rows of its replicas.
        step: Step of its next batch.
        requested: Number of batches that it waits for.
        state: Stream state that it was sent last.
    """

    channel: Channel
    reading: _Reading | None = None
    rows_of: Callable[[int], slice] = slice
    step: int = 0
    requested: int = 0
    state: StreamState | object | None = _NOT_SENT


def serve(channel: Channel) -> None:
    """Serves the processes of the host until the one that has started this one closes its channel."""
    message = channel.receive()
    assert message is not None
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(socket_address(message.header["token"]))
    listener.listen()
    header = message.header
    server = _Server(channel, listener, header["processes"], header["shard_timeout"])
    server.run(message.arrays[0].tobytes(), header["readers"])


class _Server:
    """Reads streams, and sends each process its rows."""

    def __init__(
        self, parent: Channel, listener: socket.socket, processes: int, shard_timeout: float
    ) -> None:
        self._parent = parent
        self._listener = listener
        self._processes = processes
        self._shard_timeout = shard_timeout
        self._streams: Mapping[str, BatchStream] = {}
        self._shard_processes: dict[str, ShardProcesses] = {}
        self._load_error: str | None = None
        self._clients: dict[int, _Client] = {}
        self._readings: list[_Reading] = []

    def run(self, pickled: bytes, readers: Mapping[str, int]) -> None:
        """Loads the streams by a pickled function, and serves until the parent's channel is closed.

        Args:
            pickled: The function.
            readers: Number of processes that read the shards of a stream, by its name.
        """
        try:
            for name, count in readers.items():
                self._shard_processes[name] = ShardProcesses(pickled, name, count)
            if "train" in readers:  # while this process imports and loads the same
                self._shard_processes["train"].start()
            self._streams = pickle.loads(pickled)()  # noqa: S301 - by the process that started this one
            for name, processes in self._shard_processes.items():
                if (shards := self._streams[name].shards) is not None:
                    shards.readers = processes
        except Exception as error:  # user code may raise anything
            self._load_error = error_text(error, READER)
        while True:
            due = [reading for reading in self._readings if reading.is_due()]
            descriptors = [self._parent.fileno(), self._listener.fileno(), *self._clients]
            ready = poll_readable(descriptors, 0 if due else None)
            if self._parent.fileno() in ready:
                return
            if self._listener.fileno() in ready:
                self._accept()
            for descriptor in ready:
                if descriptor in self._clients:
                    self._handle(self._clients[descriptor])
            for reading in due:
                reading.read()
            for client in list(self._clients.values()):
                self._send_requested(client)
            for reading in list(self._readings):
                reading.forget(self._processes)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if peer_pid(connection) is None:
            connection.close()
            return
        self._clients[connection.fileno()] = _Client(Channel(connection))

    def _handle(self, client: _Client) -> None:
        """Receives what a process has sent so far."""
        try:
            while (message := client.channel.receive(0)) is not None:
                header = message.header
                if self._load_error is not None:
                    client.channel.send({"error": self._load_error})
                elif "length" in header:
                    client.channel.send(self._length(header["length"]))
                elif "stream" in header:
                    self._join(client, header)
                else:
                    client.requested += 1
        except ChannelClosedError:
            self._leave(client)

    def _length(self, name: str) -> dict[str, Any]:
        stream = self._streams[name]
        try:
            return {"length": len(stream), "notes": stream.notes}
        except Exception as error:  # user code may raise anything
            return {"error": error_text(error, READER)}

    def _join(self, client: _Client, header: Mapping[str, Any]) -> None:
        """Lets a process take part in the first such reading that is new to it, or in a new one."""
        key, pid = (header["stream"], header["cut"], header["step"]), header["pid"]
        for reading in self._readings:
            if reading.key == key and pid not in reading.pids:
                break
        else:
            state = None if header["state"] is None else StreamState(**header["state"])
            if (shard_processes := self._shard_processes.get(header["stream"])) is not None:
                shard_processes.timeout = self._shard_timeout
            cut, stream = StreamCut(**header["cut"]), self._streams[header["stream"]]
            host_rows = RowsOf(**header["host_rows"])
            batches = global_batches(stream, cut, header["step"], state, host_rows)
            reading = _Reading(key, header["step"], batches, stream.read_count)
            self._readings.append(reading)
        reading.pids.add(pid)
        reading.clients.append(client)
        client.reading, client.step = reading, header["step"]
        client.rows_of = RowsOf(**header["rows"])

    def _leave(self, client: _Client) -> None:
        del self._clients[client.channel.fileno()]
        client.channel.close()
        reading = client.reading
        if reading is None:
            return
        reading.clients.remove(client)
        if not reading.clients and len(reading.pids) == self._processes:
            self._readings.remove(reading)

    def _send_requested(self, client: _Client) -> None:
        """Sends a process the batches that it waits for, as far as they were read."""
        reading = client.reading
        if reading is None:
            return
        try:
            while client.requested and client.step in reading.batches:
                batch = reading.batches[client.step]
                client.step += 1
                client.requested -= 1
                _send_batch(client, reading, batch)
            if client.requested and reading.has_ended:
                client.requested = 0
                client.channel.send(
                    {"end": True} if reading.error is None else {"error": reading.error}
                )
        except ChannelClosedError:
            self._leave(client)


def _send_batch(client: _Client, reading: _Reading, batch: GlobalBatch) -> None:
    rows = client.rows_of(batch.size)
    local_rows = slice(rows.start - batch.first_row, rows.stop - batch.first_row)
    arrays: list[np.ndarray] = []
    header = {
        "size": batch.size,
        "fingerprint": batch.fingerprint,
        "first_row": rows.start,
        "read": asdict(reading.count),
        "parts": encode_tree(map_parts(lambda array: array[local_rows], batch.parts), arrays),
    }
    if batch.stream_state is not client.state:
        client.state = state = batch.stream_state
        header["state"] = None if state is None else asdict(state)
    client.channel.send(header, arrays)
