"""The reader of a host: a process that reads streams once for all processes of a run on its machine.

It cuts the global batches, and gives each process the rows of its replicas in shared memory. They find it by
an abstract Unix socket, which leaves no file behind. The kernel ends it with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from isotrain.core.data.processes.channel import Channel, ChannelClosedError, Message
from isotrain.core.data.processes.child_process import VARIABLES, ChildProcess
from isotrain.core.data.pytree import decode_tree
from isotrain.core.data.streaming.shards import ShardedSamples
from isotrain.core.data.streaming.stream_epoch import ReadCount
from isotrain.core.data.streaming.stream_reader import GlobalBatch, RowsOf, StreamCut
from isotrain.core.data.streaming.stream_state import StreamState
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.errors import DataError, PeerLostError
from isotrain.core.system.process import describe_exit, poll_readable

LoadStreams = Callable[[], Mapping[str, BatchStream]]
"""A function that loads the streams by name; it is pickled, and called in the reader's process."""
_CONNECT_SECONDS = 0.02
_CREDENTIALS = struct.Struct("3i")
_EXIT_CODE_FIELD = 49  # of /proc/PID/stat, after the name; zombies have it
_SHARD_TIMEOUT = 0.9  # of the reader's own, so that the error names the shard
BATCHES_AHEAD = 2
"""Batches that a process requests ahead."""


def socket_address(token: str) -> str:
    """The address of the reader's socket, in the namespace of abstract Unix sockets."""
    return f"\0isotrain-reader-{token}"


def peer_pid(connection: socket.socket) -> int | None:
    """Id of the process at the other end of a Unix socket; None if it is another user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid if user == os.geteuid() else None


def _describe_end(pid: int) -> str | None:
    """The end of a process that its parent has not waited for yet, as a predicate; else None."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        code = os.waitstatus_to_exitcode(int(after_name[_EXIT_CODE_FIELD]))
        return describe_exit(code) if code else None
    return None


class HostReader:
    """One process's access to the reader of its host."""

    def __init__(
        self,
        token: str,
        processes: int,
        replicas: Sequence[int],
        *,
        start_seconds: float,
        timeout: float,
    ) -> None:
        """Connects to nothing yet.

        Args:
            token: Name of the reader, the same on all processes of the run.
            processes: Number of processes of this host that read.
            replicas: Indices of the replicas of this host.
            start_seconds: Seconds that the reader's start may take.
            timeout: Seconds without a global batch after which the reader counts as lost.
        """
        self._token = token
        self._processes = processes
        self._replicas = replicas
        self._start_seconds = start_seconds
        self._timeout = timeout
        self._child: ChildProcess | None = None
        self._pid: int | None = None  # of the reader, from the first connection on

    def start(self, load: LoadStreams, readers: Mapping[str, int] | None = None) -> None:
        """Starts the reader: one process of the host does, which the reader does not outlive.

        Args:
            load: Function that loads the streams.
            readers: Number of further processes that read the shards of a stream, by its name; those of
                `train` start at once, others when the stream is first read. The reader reads the other
                streams.

        Raises:
            DataError: The function cannot be pickled.
        """
        import cloudpickle

        try:
            pickled = cloudpickle.dumps(load)
        except Exception as error:  # an object's pickling may raise anything
            raise DataError(
                f"data: it cannot be sent to the process that reads it: {type(error).__name__}: {error}."
                " Give a function that makes the data, so that the process makes its own."
            ) from error
        self._child = ChildProcess.spawn(
            "isotrain.core.data.host_reader.reader_process:serve", VARIABLES
        )
        self._child.channel.send(
            {
                "token": self._token,
                "processes": self._processes,
                "readers": readers or {},
                "shard_timeout": _SHARD_TIMEOUT * self._timeout,
            },
            [np.frombuffer(pickled, np.uint8)],
        )

    def close(self) -> None:
        """Ends the reader, if this process has started it."""
        if self._child is not None:
            self._child.close()

    def length(self, name: str) -> tuple[int, list[str]]:
        """Number of samples of a stream, which may be counted for it, and the notes on it."""
        channel = self._connect()
        try:
            header = self._request(channel, {"length": name}).header
            return header["length"], header["notes"]
        finally:
            channel.close()

    def read(
        self,
        name: str,
        cut: StreamCut,
        step: int,
        stream_state: StreamState | None,
        rows_of: RowsOf,
        count: ReadCount,
    ) -> Iterator[GlobalBatch]:
        """The rows of replicas in the global batches of a stream, from a step to the run's end.

        All processes of the host make the same calls, in the same order.

        Args:
            name: Name of the stream.
            cut: Sizes of batches and epochs.
            step: Index of the step.
            stream_state: State of the stream at that step or earlier; None to read from its start.
            rows_of: The rows.
            count: Count that becomes the reader's, of what it has read of the stream.
        """
        channel = self._connect()
        remaining = cut.total_steps - step
        try:
            request = {
                "stream": name,
                "cut": asdict(cut),
                "step": step,
                "state": None if stream_state is None else asdict(stream_state),
                "rows": asdict(rows_of),
                "host_rows": asdict(replace(rows_of, chosen=list(self._replicas))),
                "pid": os.getpid(),
            }
            self._send(channel, request)
            for _ in range(BATCHES_AHEAD):
                self._send(channel, {})
            while "size" in (message := self._receive(channel, self._timeout)).header:
                batch = _received(message, stream_state)
                vars(count).update(message.header["read"])
                stream_state = batch.stream_state
                del message
                remaining -= 1
                yield batch
                del batch  # its memory is free for another one
                self._send(channel, {})
        except PeerLostError:  # the run has ended where the reader was started, and here too
            if remaining:
                raise
        finally:
            channel.close()

    def _connect(self) -> Channel:
        deadline = time.monotonic() + self._start_seconds
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(socket_address(self._token))
            except OSError as error:
                connection.close()
                if self._pid is not None or self._has_ended() or time.monotonic() > deadline:
                    self._raise_lost(error)
                time.sleep(_CONNECT_SECONDS)
                continue
            self._pid = peer_pid(connection)
            if self._pid is None:
                connection.close()
                raise DataError("data: the socket of the stream's reader is of another user.")
            return Channel(connection)

    def _has_ended(self) -> bool:
        """Whether the reader that this process has started has ended: it never sends here."""
        return self._child is not None and bool(poll_readable([self._child.channel.fileno()], 0))

    def _request(self, channel: Channel, header: Mapping[str, Any]) -> Message:
        self._send(channel, header)
        return self._receive(channel)

    def _send(self, channel: Channel, header: Mapping[str, Any]) -> None:
        try:
            channel.send(header)
        except ChannelClosedError as error:
            self._raise_lost(error)

    def _receive(self, channel: Channel, seconds: float | None = None) -> Message:
        """Waits for the next message for so many seconds; None: no limit, as for counting samples."""
        try:
            message = channel.receive(seconds)
        except ChannelClosedError as error:
            self._raise_lost(error)
        if message is None:
            assert self._pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGUSR1)
            raise DataError(
                f"data: the process that reads the stream (pid {self._pid}) has not answered for"
                f" {seconds:g} s (0.9 of timeouts.progress); its stack is in the log of"
                " the first rank of this host"
            )
        if (text := message.header.get("error")) is not None:
            raise DataError(text)
        return message

    def _raise_lost(self, error: Exception) -> NoReturn:
        """Raises the error of a reader that has ended, from what the connection raised.

        Raises:
            DataError: How it has ended is known here.
            PeerLostError: Only the process that has started it knows.
        """
        if self._child is not None:
            end: str | None = self._child.describe_end()
        else:
            end = None if self._pid is None else _describe_end(self._pid)
        if end is None:
            raise PeerLostError("data: the process that reads the stream has ended.") from error
        raise DataError(f"data: the process that reads the stream {end}.") from error


def _received(message: Message, stream_state: StreamState | None) -> GlobalBatch:
    """The global batch of a message; its state is sent only where it differs from the one before."""
    header = message.header
    if "state" in header:
        state = header["state"]
        stream_state = None if state is None else StreamState(**state)
    parts = decode_tree(header["parts"], message.arrays)
    return GlobalBatch(
        parts, header["size"], header["fingerprint"], stream_state, header["first_row"]
    )


class SharedStream(BatchStream):
    """A stream that the reader of the host reads."""

    def __init__(
        self,
        name: str,
        reader: HostReader,
        shards: ShardedSamples | None = None,
        *,
        collates: bool = False,
    ) -> None:
        """Reads nothing.

        Args:
            name: Name of the stream in the reader.
            reader: Reader of this host.
            shards: The stream's shards, if it has any.
            collates: Whether shapes of its global batches may differ.
        """
        super().__init__(_read_by_another, shards=shards)
        self._collates = collates
        self._name = name
        self._reader = reader

    @property
    def collates(self) -> bool:
        """Whether shapes of its global batches may differ."""
        return self._collates

    def __len__(self) -> int:
        """Number of samples per epoch; the reader may read the first epoch to count them."""
        if self._samples is None:
            self._samples, self.notes = self._reader.length(self._name)
        return self._samples

    def shared_batches(
        self,
        cut: StreamCut,
        step: int,
        stream_state: StreamState | None,
        rows_of: RowsOf,
    ) -> Iterator[GlobalBatch]:
        """The rows of replicas in the global batches, as `HostReader.read`."""
        return self._reader.read(self._name, cut, step, stream_state, rows_of, self.read_count)


def _read_by_another() -> NoReturn:
    raise AssertionError("the reader of the host reads this stream")
