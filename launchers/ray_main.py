"""Runs a command on every rank by actors of Ray: the program that the launcher `ray` starts.

What the ranks print comes out of it, as out of `srun`, and it ends with the exit status of the first that
failed. SIGTERM is handed on to all of them. Ray sends the actors' class to the hosts as it is here, so it
uses nothing but Python there.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_LOOK_SECONDS = 0.5
_SAY_SECONDS = 10.0
"""For so long nothing is said of resources that are waited for."""
_GRACE_SECONDS = 15.0
"""Which ranks have to end by themselves once one has failed: they know of it, and say more."""
_LOST = 1
"""The exit status for a rank whose host or actor is lost."""
_DEVICES = "CUDA_VISIBLE_DEVICES"


class Worker:
    """Runs the command of one rank where Ray has placed it."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()
        """Lines, and whether each is an error's."""
        self._process: subprocess.Popen[str] | None = None
        self._has_started = threading.Event()
        self._status: int | None = None

    def place(self) -> tuple[str, str, str]:
        """The node, its address, and the devices that are this worker's."""
        node = ray.get_runtime_context().get_node_id()
        return node, ray.util.get_node_ip_address(), os.environ.get(_DEVICES, "")

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Starts it. The system ends it when the thread that has started it ends, so that lives as long."""
        given = (command, {**os.environ, **variables})
        threading.Thread(target=self._keep, args=given, daemon=True).start()
        self._has_started.wait()

    def _keep(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        set_up = ctypes.CDLL(None).prctl
        try:
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                text=True,
                errors="replace",
                env=variables,
                preexec_fn=lambda: set_up(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
            )
        except OSError as error:
            self._said.put((True, f"{command[0]} cannot be started: {error}\n"))
            self._status = 127
            return
        finally:
            self._has_started.set()
        streams = ((False, process.stdout), (True, process.stderr))
        readers = [threading.Thread(target=self._read, args=each) for each in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        self._status = process.wait()

    def _read(self, is_error: bool, stream: IO[str]) -> None:
        for line in stream:
            self._said.put((is_error, line))

    def hear(self, seconds: float) -> tuple[list[tuple[bool, str]], int | None]:
        """What was said since the last call; and, once all of it is, the exit status.

        Args:
            seconds: To wait for something.
        """
        status = self._status
        lines = []
        try:
            lines.append(self._said.get(timeout=0 if status is not None else seconds))
            while True:
                lines.append(self._said.get_nowait())
        except queue.Empty:
            return lines, status

    def signal(self, number: int) -> None:
        """Sends a signal to the rank's processes."""
        if self._process is not None and self._status is None:
            os.killpg(self._process.pid, number)


class Ranks:
    """All workers while they run."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers
        self._heard = {
            worker.hear.remote(_LOOK_SECONDS): rank for rank, worker in enumerate(workers)
        }
        """What is waited for, of those that run."""
        self._status = 0
        self._deadline: float | None = None

    def follow(self, wanted: Wanted) -> int:
        """Passes on what they say, until none runs; gives the exit status."""
        told = False
        while self._heard:
            if wanted.is_over and not told:
                told = True
                self._signal(signal.SIGTERM)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._signal(signal.SIGKILL)
                self._deadline = None
            ready, _ = ray.wait([*self._heard], timeout=_LOOK_SECONDS)
            for reference in ready:
                self._hear(reference, self._heard.pop(reference))
        return self._status

    def _signal(self, number: int) -> None:
        for rank in self._heard.values():
            self._workers[rank].signal.remote(number)

    def _hear(self, reference: Any, rank: int) -> None:
        try:
            lines, status = ray.get(reference)
        except RayActorError as error:
            lines, status = [(True, f"its actor is lost: {error}\n")], _LOST
        for is_error, line in lines:
            whose = f"rank {rank}: " if rank else ""
            print(f"{whose}{line}", end="", file=sys.stderr if is_error else sys.stdout, flush=True)
        if status is None:
            self._heard[self._workers[rank].hear.remote(_LOOK_SECONDS)] = rank
        elif status:
            self._status = self._status or abs(status)
            self._deadline = self._deadline or time.monotonic() + _GRACE_SECONDS


class Wanted:
    """Whether this program is still to go on.

    Attributes:
        is_over: Whether it was asked to end.
    """

    def __init__(self) -> None:
        self.is_over = False
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        self.is_over = True


def placed(asked: argparse.Namespace, wanted: Wanted) -> PlacementGroup | None:
    """The placement group, once Ray has all that it asks for; None where that is not waited for any more."""
    group = placement_group([asked.bundle] * asked.workers, strategy=asked.placement)
    ready = group.ready()
    told = time.monotonic() + _SAY_SECONDS
    while not wanted.is_over:
        try:
            ray.get(ready, timeout=_LOOK_SECONDS)
            return group
        except GetTimeoutError:
            if time.monotonic() > told:
                told = float("inf")
                print(_missing(asked), flush=True)
    return None


def _missing(asked: argparse.Namespace) -> str:
    """What is waited for."""
    free = {name: count for name, count in ray.available_resources().items() if ":" not in name}
    return (
        f"ray: waiting for {asked.workers} x {json.dumps(asked.bundle)} ({asked.placement}); free on"
        f" {len(ray.nodes())} nodes are {json.dumps(free)}"
    )


def workers_in(group: PlacementGroup, bundle: Mapping[str, float]) -> list[Any]:
    """An actor in each place of a group."""
    further = {name: count for name, count in bundle.items() if name not in ("CPU", "GPU")}
    return [
        ray.remote(Worker)
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=further,
            max_concurrency=3,  # one hears, while others start and signal
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        .remote()
        for index in range(group.bundle_count)
    ]


def ranked(workers: Sequence[Any]) -> tuple[list[Any], list[dict[str, str]]]:
    """The workers by rank, host by host; and what tells each its place."""
    places = ray.get([worker.place.remote() for worker in workers])
    job = ray.get_runtime_context().get_job_id()
    hosts: dict[str, list[int]] = {}
    for number, (node, _, _) in enumerate(places):
        hosts.setdefault(node, []).append(number)
    by_rank: list[Any] = []
    told: list[dict[str, str]] = []
    for node_rank, own in enumerate(hosts.values()):
        # Each sees the devices of all on its host: it is told which is its own by its place there.
        devices = ",".join(filter(None, (places[number][2] for number in own)))
        for local_rank, number in enumerate(own):
            by_rank.append(workers[number])
            told.append(
                {
                    "RAY_JOB_ID": job,
                    "RAY_TRAIN_WORLD_SIZE": str(len(workers)),
                    "RAY_TRAIN_WORLD_RANK": str(len(told)),
                    "RAY_TRAIN_LOCAL_RANK": str(local_rank),
                    "RAY_TRAIN_LOCAL_WORLD_SIZE": str(len(own)),
                    "RAY_TRAIN_NODE_RANK": str(node_rank),
                    "RAY_TRAIN_COORDINATOR": places[0][1],
                    _DEVICES: devices,
                }
            )
    return by_rank, told


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="isotrain.launchers.ray_main")
    parser.add_argument("--address", default="")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--bundle", type=json.loads, required=True)
    parser.add_argument("--placement", required=True)
    parser.add_argument("-x", action="append", default=[], dest="variables", metavar="NAME")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def main() -> int:
    """Runs the command; gives the exit status."""
    asked = _arguments()
    ray.init(asked.address or None, log_to_driver=False)
    wanted = Wanted()  # after Ray has set a handler of its own
    group = placed(asked, wanted)
    if group is None:
        return 128 + signal.SIGTERM
    workers, told = ranked(workers_in(group, asked.bundle))
    common = {name: os.environ[name] for name in asked.variables if name in os.environ}
    starting = zip(workers, told, strict=True)
    ray.get([worker.start.remote(asked.command, {**common, **own}) for worker, own in starting])
    return Ranks(workers).follow(wanted)


if __name__ == "__main__":
    sys.exit(main())
