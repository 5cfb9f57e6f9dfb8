"""What a process really sent: the kernel's own count, for each of its TCP connections."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from isotrain.testing.file_exchange import FileExchange

_BYTES_SENT = 200
"""Where Linux's `struct tcp_info` has `tcpi_bytes_sent`, and after it how many of these were sent again."""


def bytes_sent() -> int:
    """Bytes that this process has sent over its open connections so far."""
    return sum(int(sent) for _, _, sent in connections())


def connections() -> Iterator[tuple[int, int, int]]:
    """Own port, the other end's port, and the bytes sent, each once, of every open TCP connection."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.type != socket.SOCK_STREAM or found.family not in _INTERNET:
                    continue
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, again = struct.unpack_from("QQ", info, _BYTES_SENT)
                yield found.getsockname()[1], found.getpeername()[1], sent - again
        except OSError:
            continue  # closed meanwhile, or it only listens


_INTERNET = (socket.AF_INET, socket.AF_INET6)


def sent_to(board: FileExchange, processes: int) -> np.ndarray:
    """Bytes this process sent to each process so far. Called by all."""
    own = np.array(list(connections()), dtype=np.int64).reshape(-1, 3)
    result = np.zeros(processes, dtype=np.int64)
    for rank, shown in enumerate(board.all_gather({"connections": own})):
        ends = {(local, remote) for local, remote, _ in shown["connections"].tolist()}
        result[rank] = sum(s for local, remote, s in own.tolist() if (remote, local) in ends)
    return result
