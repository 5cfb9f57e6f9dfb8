"""Replicas wait for rank 0's server before their framework tries to reach it."""

from __future__ import annotations

import socket
import threading

from isotrain.adapters.common.wait_for_server import wait_for_rank_zero
from isotrain.core.contracts.process import LOCALHOST, ProcessContext, ProcessInfo

LIMIT_SECONDS = 60.0
MOMENT_SECONDS = 0.05


def context(rank: int, server: socket.socket) -> ProcessContext:
    port = server.getsockname()[1]
    processes = tuple(ProcessInfo(each, "here", each, (each,)) for each in range(2))
    return ProcessContext(rank, 2, "", processes, ((LOCALHOST, port), (LOCALHOST, port + 1)))


def test_all_but_rank_0_wait_until_it_listens() -> None:
    with socket.socket() as server:
        server.bind((LOCALHOST, 0))  # nobody else gets the port, and connections are refused
        wait_for_rank_zero(context(0, server))
        waiting = threading.Thread(
            target=wait_for_rank_zero, args=(context(1, server), 2 * LIMIT_SECONDS)
        )
        waiting.start()
        waiting.join(MOMENT_SECONDS)
        assert waiting.is_alive()
        server.listen()
        waiting.join(LIMIT_SECONDS)
        assert not waiting.is_alive()
