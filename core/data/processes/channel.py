"""A channel of two processes of one host: JSON values over a Unix socket, arrays in shared memory.

The memory is anonymous (`memfd_create`), and its descriptors travel over the socket. So it has no name in
/dev/shm and no size limit but that of memory, and the kernel frees it when the last process that has it ends,
however that ends. The end of the socket's stream tells each process that the other is gone.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import pickle
import socket
import struct
import traceback
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from isotrain.core.data.arrays import Allocate
from isotrain.core.errors import DataError
from isotrain.core.system.process import poll_readable

_INLINE_BYTES = 4096  # up to this size, arrays follow the header on the socket
_ALIGNMENT = 64
_LENGTHS = struct.Struct("=II")
_READ_BYTES = 1 << 16


class ChannelClosedError(EOFError):
    """The other end is closed, or its process has ended."""


class Message(NamedTuple):
    """A received message.

    Attributes:
        header: JSON values.
        arrays: Arrays of any shapes and dtypes; those in shared memory may be written to, and the memory is
            used again when nothing refers to it any more.
    """

    header: dict[str, Any]
    arrays: list[np.ndarray]


class _Block:
    """Shared memory of this process, which the sender of its descriptor writes.

    Attributes:
        size: Number of its bytes.
        unsent: Its descriptor, if it is still to be sent.
        users: How many refer to arrays in it: this process and the receiver.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Maps `size` bytes; the descriptor may be closed afterwards."""
        self.size = size
        self.unsent: int | None = None
        self.users = 0
        self._pages = mmap.mmap(descriptor, size)

    def bytes(self) -> np.ndarray:
        """A new array of all bytes, uint8 [size]; NumPy keeps it as the `base` of all views of it."""
        return np.frombuffer(self._pages, np.uint8)

    def close_unsent(self) -> None:
        """Closes the descriptor, if it is open."""
        if self.unsent is not None:
            os.close(self.unsent)
            self.unsent = None


class _Draft:
    """A block in which the arrays of the next message are made, so that they need not be copied to it."""

    def __init__(self, number: int, memory: np.ndarray) -> None:
        """Takes the number of a block, and its bytes (uint8)."""
        self.number = number
        self._memory = memory
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """A new array, not initialised; in memory of its own if the block has not enough left."""
        start = self._used + -self._used % _ALIGNMENT
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(self._memory):
            return np.empty(shape, dtype)
        self._used = end
        return np.ndarray(shape, dtype, self._memory, start)

    def layout(self, arrays: Sequence[np.ndarray]) -> list[int] | None:
        """The first byte of each array, copied here unless it is here; None if they do not fit.

        An array that shares bytes with an earlier one is copied, as the receiver may write to each.
        """
        starts: list[int] = []
        for array in arrays:
            start = self._start(array)
            if start is None or any(
                start < other + arrays[before].nbytes and other < start + array.nbytes
                for before, other in enumerate(starts)
            ):
                copy = self.array(array.shape, array.dtype)
                np.copyto(copy, array)
                start = self._start(copy)
            if start is None:
                return None
            starts.append(start)
        return starts

    def _start(self, array: np.ndarray) -> int | None:
        """The first byte of an array; None if it is in other memory, or has gaps."""
        start: int = (
            array.__array_interface__["data"][0] - self._memory.__array_interface__["data"][0]
        )
        is_here = 0 <= start <= len(self._memory) - array.nbytes and array.flags.c_contiguous
        return start if is_here else None


class Channel:
    """One end of a channel; not for several threads at once.

    Each end writes arrays to blocks of its own. The receiver reports with its next message which blocks
    nothing refers to any more; these are written again, and others are created as they are needed.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Takes over a connected Unix stream socket."""
        self._socket = connection
        self._unread = bytearray()
        self._descriptors: deque[int] = deque()
        self._written: dict[int, _Block] = {}
        self._free: list[int] = []  # numbers of written blocks without users
        self._dropped: deque[int] = (
            deque()
        )  # numbers of those to which this process has no reference now
        self._draft: _Draft | None = None
        self._largest = 0  # bytes of arrays in a message so far
        self._read: dict[int, _Block] = {}
        self._released: deque[int] = deque()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Both ends of a new channel."""
        first, second = socket.socketpair()
        return cls(first), cls(second)

    def fileno(self) -> int:
        """File descriptor of the socket, for selectors."""
        return self._socket.fileno()

    def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends JSON values, and arrays of any shapes and of dtypes without Python objects.

        Raises:
            ChannelClosedError: The other end is closed.
            DataError: There is no memory for the arrays.
        """
        arrays = [np.asarray(array) for array in arrays]
        released = [self._released.popleft() for _ in range(len(self._released))]
        envelope: dict[str, Any] = {"header": header, "released": released}
        draft, self._draft = self._draft, None
        block, inline = None, b""
        starts, size = _layout(arrays)
        self._largest = max(self._largest, size)
        if size <= _INLINE_BYTES:
            memory = np.empty(size, np.uint8)
            _copy(arrays, memory, starts)
            inline = memory.tobytes()
        elif draft is not None and (drafted := draft.layout(arrays)) is not None:
            number, starts = draft.number, drafted
            block = self._written[number]
        else:
            number = self._block_for(size)
            block = self._written[number]
            _copy(arrays, block.bytes(), starts)
        if block is not None:
            block.users += 1
            envelope |= {"block": number, "size": block.size}
        envelope["arrays"] = [
            [array.dtype.str, array.shape, start]
            for array, start in zip(arrays, starts, strict=True)
        ]
        text = json.dumps(envelope).encode()
        try:
            data = _LENGTHS.pack(len(text), len(inline)) + text + inline
            self._send(data, None if block is None else block.unsent)
        finally:
            if block is not None:
                block.close_unsent()

    def draft(self) -> Allocate:
        """Function that makes arrays in shared memory, which the next `send` then need not copy.

        What of this memory is still referred to when it is sent is not written again before that ends.
        """
        if self._largest <= _INLINE_BYTES:
            return np.empty
        number = self._block_for(self._largest)
        block = self._written[number]
        memory = block.bytes()
        block.users = 1
        weakref.finalize(memory, self._dropped.append, number).atexit = False
        self._draft = _Draft(number, memory)
        return self._draft.array

    def receive(self, seconds: float | None = None) -> Message | None:
        """Waits for the next message for so many seconds (None: no limit); None if there is none by then.

        Raises:
            ChannelClosedError: The other end is closed, and all its messages were received.
        """
        while (frame := self._next_frame()) is None:
            if not poll_readable([self.fileno()], seconds):
                return None
            self._read_socket()
        text, inline = frame
        envelope = json.loads(text)
        for number in envelope["released"]:
            self._drop(number)
        if (number := envelope.get("block")) is None:
            return Message(envelope["header"], _views(np.array(inline), envelope["arrays"]))
        block = self._read.get(number)
        if block is None or block.size != envelope["size"]:
            descriptor = self._descriptors.popleft()
            block = self._read[number] = _Block(descriptor, envelope["size"])
            os.close(descriptor)
        memory = block.bytes()
        weakref.finalize(memory, self._released.append, number).atexit = False
        return Message(envelope["header"], _views(memory, envelope["arrays"]))

    def close(self) -> None:
        """Closes this end; arrays that were received stay valid."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        for block in self._written.values():
            block.close_unsent()
        for blocks in (self._descriptors, self._written, self._read):
            blocks.clear()

    def _drop(self, number: int) -> None:
        """Takes away a user of a written block; without any, it is written again."""
        block = self._written[number]
        block.users -= 1
        if not block.users:
            self._free.append(number)

    def _block_for(self, size: int) -> int:
        """The number of a free block of at least `size` bytes."""
        while self._dropped:
            self._drop(self._dropped.popleft())
        fitting = [number for number in self._free if self._written[number].size >= size]
        if fitting:
            self._free.remove(fitting[0])
            return fitting[0]
        number = self._free.pop() if self._free else len(self._written)
        size += -size % mmap.PAGESIZE
        replaced = self._written.get(number)
        if replaced is not None:
            size = max(size, replaced.size * 5 // 4)
            size += -size % mmap.PAGESIZE
        descriptor = os.memfd_create("isotrain-samples", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._written[number] = _Block(descriptor, size)
            self._written[number].unsent = descriptor
        except OSError as error:
            os.close(descriptor)
            self._free += [] if replaced is None else [number]
            raise DataError(
                f"data: no memory for {size / 2**20:.1f} MiB of samples ({error.strerror}): lower"
                " loader.workers or loader.prefetch, or the batch size."
            ) from error
        if replaced is not None:
            replaced.close_unsent()
        return number

    def _send(self, data: bytes, descriptor: int | None) -> None:
        try:
            descriptors = [] if descriptor is None else [descriptor]
            sent = socket.send_fds(self._socket, [data], descriptors)
            if sent < len(data):
                self._socket.sendall(memoryview(data)[sent:])
        except OSError as error:
            raise ChannelClosedError from error

    def _read_socket(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, _READ_BYTES, 16, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise ChannelClosedError from error
        self._descriptors += descriptors
        if not data:
            raise ChannelClosedError
        self._unread += data

    def _next_frame(self) -> tuple[bytes, np.ndarray] | None:
        """The next message's JSON text and inline bytes (uint8); None before all of it is read."""
        if len(self._unread) < _LENGTHS.size:
            return None
        text_size, inline_size = _LENGTHS.unpack_from(self._unread)
        start = _LENGTHS.size + text_size
        if len(self._unread) < start + inline_size:
            return None
        frame = bytes(self._unread[: start + inline_size])
        del self._unread[: start + inline_size]
        return frame[_LENGTHS.size : start], np.frombuffer(frame, np.uint8, offset=start)


def _layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """The first byte of each array in a block, and the bytes of all."""
    starts, size = [], 0
    for array in arrays:
        size += -size % _ALIGNMENT
        starts.append(size)
        size += array.nbytes
    return starts, size


def _copy(arrays: Sequence[np.ndarray], memory: np.ndarray, starts: Sequence[int]) -> None:
    """Copies arrays to memory, uint8 [size], each to its first byte."""
    for array, start in zip(arrays, starts, strict=True):
        np.copyto(np.ndarray(array.shape, array.dtype, memory, start), array)


def _views(memory: np.ndarray, shapes: Sequence[Any]) -> list[np.ndarray]:
    """Arrays of [dtype, shape, first byte] in memory, uint8 [size]."""
    return [np.ndarray(shape, dtype, memory, start) for dtype, shape, start in shapes]


def send_object(channel: Channel, header: Mapping[str, Any], value: Any) -> None:
    """Sends any value with JSON values; the arrays in it go through shared memory."""
    import cloudpickle

    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    arrays = [np.frombuffer(pickled, np.uint8), *(np.asarray(each.raw()) for each in buffers)]
    channel.send(header, arrays)


def received_object(message: Message) -> Any:
    """The value of a message of `send_object`, from a process that this one has started."""
    pickled, *buffers = message.arrays
    return pickle.loads(pickled.data, buffers=buffers)  # noqa: S301 - by our child


def error_text(error: Exception, raised_by: str) -> str:
    """The message of an error of ours, or the traceback of another that a process has raised."""
    if isinstance(error, DataError):
        return str(error)
    text = "".join(traceback.format_exception(error)).rstrip()
    return f"data: {raised_by} raised {type(error).__name__}: {error}\n{text}"
