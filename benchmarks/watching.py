"""Cost for rank 0 of watching the other ranks of a run started from outside, by their number.

`python -m benchmarks.watching`: what the other rank of a real run of two says is recorded. A second process
says it again, over as many connections, in the names of many ranks, and tells where they are as often as
ranks of a run of that size do. Printed are, of rank 0, which hears all of it, judges who lives, and lets all
of them hear of itself: the processor time for each second of the run, the memory that it comes to use, and
the bytes that it hears each second.

`--processes N`: so many real processes instead, of the reference backend, which train for a while.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

import isotrain
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.launching.supervision.supervisor import Supervisor
from isotrain.core.rendezvous.heartbeat import HeartbeatInterval
from isotrain.core.rendezvous.local_reporter import LocalReporter
from isotrain.core.rendezvous.rank_zero import heartbeats
from isotrain.core.rendezvous.remote_process import RemoteProcess
from isotrain.core.rendezvous.state_exchange import StateExchange
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.connection import Connection
from isotrain.core.transport.message_auth import MacPair
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

_SILENCE = 10.0
_LIMITS = {"silence": _SILENCE, "start": 600.0, "progress": 600.0}
_RECORDED = 2
"""Processes of the run whose ranks but for the first are recorded."""
_HEAD = "ranks  of one core  of that, a rank  memory, a rank  heard of a rank"


@dataclass(frozen=True)
class Cost:
    """Cost for rank 0 of watching all other ranks.

    Attributes:
        share: Fraction of a processor core.
        memory: Memory in bytes.
        heard: Received bytes per second; None: they were not counted.
    """

    share: float
    memory: float
    heard: float | None = None


Stream = Sequence[tuple[float, Mapping[str, Any]]]
"""Messages of a rank, each with its second."""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="64,512,4096")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--say", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.say is not None:
        _say_all(given.say, int(given.ranks), _recorded_in(given.record))
    elif given.processes is not None:
        _run_processes(given.processes, given.seconds, given.record)
    else:
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder)
            _run_processes(_RECORDED, given.seconds, record)
            print(_HEAD)
            for ranks in map(int, given.ranks.split(",")):
                _report(ranks, _watched(ranks, record))


def _report(ranks: int, cost: Cost) -> None:
    share, memory = cost.share / ranks * 1e6, cost.memory / ranks / 1024
    heard = "" if cost.heard is None else f"{cost.heard / ranks:13.0f} B/s"
    print(f"{ranks:5}{cost.share:12.1%}{share:13.0f} ppm{memory:12.1f} KiB{heard}", flush=True)


def _watched(ranks: int, record: Path) -> Cost:
    before, seconds = _memory(), max(stream[-1][0] for stream in _recorded_in(record))
    with socket.create_server(("127.0.0.1", 0), backlog=ranks) as door:
        port = str(door.getsockname()[1])
        command = [sys.executable, "-m", "benchmarks.watching", "--say", port]
        with subprocess.Popen([*command, "--ranks", str(ranks), "--record", str(record)]):
            channels = [_channel(door.accept()[0], is_client=False) for _ in range(ranks)]
            share, heard = (each / seconds for each in _heard(channels))
            return Cost(share, _memory() - before, heard)


def _memory() -> int:
    """Bytes that this process has now."""
    found: int = psutil.Process().memory_info().rss
    return found


def _channel(connection: socket.socket, *, is_client: bool) -> Channel:
    """Channel with a MAC on each message, as in the rendezvous."""
    return Channel(Connection(connection, MacPair.derive(b"watching", is_client=is_client)))


def _heard(channels: list[Channel]) -> tuple[float, int]:
    """Seconds of processor time, and bytes."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = dict(enumerate(channels))
        exchange = StateExchange(0, by_rank)
        remote = [
            RemoteProcess(
                channel,
                ProcessInfo(rank, "far", rank, (rank,)),
                ("far", 0),
                Path(folder),
                exchange,
            )
            for rank, channel in enumerate(channels)
        ]
        line = LocalReporter(0)
        before = time.process_time()
        with heartbeats(line, by_rank, HeartbeatInterval.of(len(channels), _SILENCE).max_seconds):
            failure = Supervisor(remote, _LIMITS, lambda event: None).run()
        assert failure is None, failure
        took, heard = time.process_time() - before, sum(each.received for each in channels)
        line.close()
        for channel in channels:
            channel.close()
    return took, heard


def _say_all(port: int, ranks: int, streams: Sequence[Stream]) -> None:
    """The part of all other ranks."""
    door = "127.0.0.1", port
    channels = [_channel(socket.create_connection(door), is_client=True) for _ in range(ranks)]
    threading.Thread(target=_drop, args=(channels,), daemon=True).start()
    pace = HeartbeatInterval.of(ranks, _SILENCE).min_seconds
    sayings = sorted(
        (
            (moment, rank, told)
            for rank in range(ranks)
            for moment, told in _of(rank, streams, pace)
        ),
        key=lambda saying: saying[:2],
    )
    began = time.monotonic()
    for moment, rank, told in sayings:
        time.sleep(max(0.0, began + moment + rank / ranks * pace - time.monotonic()))
        channels[rank].send(_in_the_name_of(rank, told))
    time.sleep(1.0)


def _of(rank: int, streams: Sequence[Stream], pace: float) -> Iterator[tuple[float, Any]]:
    """Messages of a rank with their times; statuses only as often as in a run of that size."""
    last = -pace
    for moment, told in streams[rank % len(streams)]:
        if "status" in told and "event" not in told:
            if moment - last < pace:
                continue
            last = moment
        yield moment, told


def _in_the_name_of(rank: int, told: Mapping[str, Any]) -> dict[str, Any]:
    """The same, as this rank would say it now."""
    said = dict(told)
    if "clock" in said:
        said["clock"] = time.time()
    if "event" in said:
        event = {**json.loads(said["event"]), "rank": rank, "time": time.time()}
        said["event"] = json.dumps(event)
    return said


def _recorded_in(folder: Path) -> list[Stream]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


@contextlib.contextmanager
def _recording(folder: Path | None) -> Iterator[None]:
    """Within it, what this process tells rank 0 of itself is kept, and written at the end."""
    said: list[tuple[float, Any]] = []
    send, began = Channel.send, time.monotonic()

    def heard(channel: Channel, header: Mapping[str, Any], *arrays: Any) -> None:
        if {"status", "event", "output"} & {*header}:
            said.append((time.monotonic() - began, dict(header)))
        send(channel, header, *arrays)

    with mock.patch.object(Channel, "send", heard):
        yield
    if folder is not None and said:
        first = said[0][0]
        stream = [(moment - first, header) for moment, header in said]
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(stream))


def _drop(channels: list[Channel]) -> None:
    while True:
        for channel in channels:
            channel.read()
        time.sleep(0.2)


def _model() -> Network:
    return Network([Dense(4, 2)])


def _run_processes(count: int, seconds: float, record: Path | None) -> None:
    """Starts them as an engine does, each with its place in its variables."""
    if "RANK" in os.environ:
        with _recording(record):
            found = _take_part(seconds)
        if os.environ["RANK"] == "0" and record is None:
            _report_all(found)
        return
    job = f"watching-{os.getpid()}"
    told: dict[str, Any] = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": job}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": 1}
    common = {**os.environ, **{name: str(value) for name, value in told.items()}}
    again = [sys.executable, "-m", "benchmarks.watching", "--processes", str(count)]
    again += ["--record", str(record)] if record is not None else []
    ranks = [
        subprocess.Popen(
            [*again, "--seconds", str(seconds)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    codes = [process.wait() for process in ranks]
    assert not any(codes), codes


def _take_part(seconds: float) -> list[Any]:
    """Trains for a while; gives processor time of a second and memory of each process."""
    import numpy as np

    inputs = np.zeros((1024, 4))
    spec = {"name": "watching", "model": _model, "data": lambda: (inputs, inputs[:, :2])}
    spec |= {"loss": "mean_squared_error", "optimizer": {"name": "sgd", "lr": 0.125}}
    spec |= {"global_batch_size": 1024, "epochs": 10**6, "plugins": ["isotrain.testing.reference"]}
    spec |= {"timeouts": {"start": 600.0}}

    def work(session: isotrain.Session) -> list[float]:
        end, before = time.monotonic() + seconds, _of_the_watcher()
        for batch in session.batches():
            session.step(batch)
            time.sleep(0.1)  # as a step of a real model takes
            if batch.step >= seconds * 5:
                break
        return [(_of_the_watcher() - before) / (time.monotonic() - end + seconds), _memory()]

    with tempfile.TemporaryDirectory() as folder:
        return isotrain.launch(
            work,
            spec,
            backend="reference",
            output=Path(folder) / "run",
            on_event=lambda event: None,
        )


def _report_all(found: Sequence[Any]) -> None:
    (share, memory), *others = found
    more = memory - statistics.median(each for _, each in others)
    print(_HEAD)
    _report(len(found), Cost(share, more))


def _of_the_watcher() -> float:
    """Processor time of the main thread, which watches while another one works."""
    own = next(each for each in psutil.Process().threads() if each.id == os.getpid())
    return own.user_time + own.system_time


if __name__ == "__main__":
    main()
