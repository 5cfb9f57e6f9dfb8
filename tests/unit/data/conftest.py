"""Readers of a host, as real processes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from isotrain.core.data.host_reader.host_reader import HostReader, SharedStream

Connect = Callable[..., list[SharedStream]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Starts a reader, and gives the streams of so many "processes" of its host."""
    readers: list[HostReader] = []

    def connect(
        load: Callable[[], Any],
        processes: int = 1,
        shard_processes: int = 1,
        replicas: Sequence[int] | None = None,
    ) -> list[SharedStream]:
        token = secrets.token_hex(8)
        limits = {"start_seconds": 60.0, "timeout": 300.0}
        here = replicas or range(processes)
        made = [HostReader(token, processes, here, **limits) for _ in range(processes)]
        made[0].start(load, {"train": shard_processes} if shard_processes > 1 else {})
        readers.extend(made)
        return [SharedStream("train", each) for each in made]

    yield connect
    for each in readers:
        each.close()
