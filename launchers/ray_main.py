"""Program of the launcher `ray`: runs a command on every rank by Ray actors.

Like `srun`, it prints the output of all ranks, exits with the exit code of the first that failed, and passes
SIGTERM on to all of them. Ray ships the actor class by value, so the class uses only the standard library
and Ray on the other hosts.
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
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_POLL_SECONDS = 0.5
_ANNOUNCE_SECONDS = 10.0
"""Seconds of waiting for resources after which that is printed."""
_GRACE_SECONDS = 15.0
"""Seconds that the other ranks have to end by themselves once one has failed; they report more about it.

In an elastic run they go on, and have these seconds once rank 0 has ended.
"""
_LOST = 1
"""Exit code for a rank whose host or actor is lost."""
_DEVICES = "CUDA_VISIBLE_DEVICES"


class Worker:
    """Ray actor that runs the command of one rank."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()
        """Pairs of whether it is standard error, and a line."""
        self._process: subprocess.Popen[str] | None = None
        self._has_started = threading.Event()
        self._status: int | None = None

    def location(self) -> tuple[str, str, str]:
        """Node ID, node address, and visible devices of this worker."""
        node = ray.get_runtime_context().get_node_id()
        return node, ray.util.get_node_ip_address(), os.environ.get(_DEVICES, "")

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Starts the command, on a thread that lives as long: PR_SET_PDEATHSIG acts at the thread's end."""
        arguments = (command, {**os.environ, **variables})
        threading.Thread(target=self._run, args=arguments, daemon=True).start()
        self._has_started.wait()

    def _run(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        prctl = ctypes.CDLL(None).prctl
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
                preexec_fn=lambda: prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
            )
        except OSError as error:
            self._lines.put((True, f"{command[0]} cannot be started: {error}\n"))
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
            self._lines.put((is_error, line))

    def read_output(self, seconds: float) -> tuple[list[tuple[bool, str]], int | None]:
        """The lines since the last call; and, after the last line, the exit code.

        Args:
            seconds: Time to wait for a line.
        """
        status = self._status
        lines = []
        try:
            lines.append(self._lines.get(timeout=0 if status is not None else seconds))
            while True:
                lines.append(self._lines.get_nowait())
        except queue.Empty:
            return lines, status

    def signal(self, number: int) -> None:
        """Sends a signal to the rank's processes."""
        if self._process is not None and self._status is None:
            os.killpg(self._process.pid, number)


class Ranks:
    """The workers of all ranks, while they run."""

    def __init__(
        self,
        workers: Sequence[Any],
        replace: Callable[[int], Any] | None = None,
        replacements: int = 0,
    ) -> None:
        """Follows workers that run.

        Args:
            workers: The workers, by rank.
            replace: Starts a worker in place of that of a lost rank, whose resources are free; None: the run
                is not elastic.
            replacements: Number of workers that may be started so.
        """
        self._workers = list(workers)
        self._count = len(workers)
        self._replace = replace
        self._left_over = replacements
        self._pending = {
            worker.read_output.remote(_POLL_SECONDS): rank for rank, worker in enumerate(workers)
        }
        """Pending reads of the running ranks: object reference to rank."""
        self._status = 0
        self._deadline: float | None = None

    def follow(self, stop_request: StopRequest) -> int:
        """Prints the output of the ranks until none runs; returns the exit code."""
        is_signaled = False
        while self._pending:
            if stop_request.is_set and not is_signaled:
                is_signaled = True
                self._signal(signal.SIGTERM)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._signal(signal.SIGKILL)
                for rank in self._pending.values():
                    if rank >= self._count:  # it may still wait for a host
                        ray.kill(self._workers[rank])
                self._deadline = None
            ready, _ = ray.wait([*self._pending], timeout=_POLL_SECONDS)
            for reference in ready:
                self._print_output(reference, self._pending.pop(reference))
        return self._status

    def _signal(self, number: int) -> None:
        for rank in self._pending.values():
            self._workers[rank].signal.remote(number)

    def _print_output(self, reference: Any, rank: int) -> None:
        try:
            lines, status = ray.get(reference)
        except RayActorError as error:
            lines, status = [(True, f"its actor is lost: {error}\n")], _LOST
        for is_error, line in lines:
            prefix = f"rank {rank}: " if rank else ""
            stream = sys.stderr if is_error else sys.stdout
            print(f"{prefix}{line}", end="", file=stream, flush=True)
        if status is None:
            self._pending[self._workers[rank].read_output.remote(_POLL_SECONDS)] = rank
            return
        self._status = self._status or abs(status)
        if status and rank and self._left_over and 0 in self._pending.values():
            self._left_over -= 1
            self._start_in_place_of(rank)
        ends_others = rank == 0 if self._replace else status != 0
        if ends_others:
            self._deadline = self._deadline or time.monotonic() + _GRACE_SECONDS

    def _start_in_place_of(self, rank: int) -> None:
        assert self._replace is not None
        ray.kill(self._workers[rank])
        worker = self._replace(rank)
        self._pending[worker.read_output.remote(_POLL_SECONDS)] = len(self._workers)
        self._workers.append(worker)


class StopRequest:
    """Flag that SIGTERM sets.

    Attributes:
        is_set: Whether this program is to end.
    """

    def __init__(self) -> None:
        self.is_set = False
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, *_: object) -> None:
        self.is_set = True


def await_placement(
    arguments: argparse.Namespace, stop_request: StopRequest
) -> PlacementGroup | None:
    """The placement group, once Ray has reserved its resources; None if a stop was requested before."""
    group = placement_group([arguments.bundle] * arguments.workers, strategy=arguments.placement)
    ready = group.ready()
    announce_at = time.monotonic() + _ANNOUNCE_SECONDS
    while not stop_request.is_set:
        try:
            ray.get(ready, timeout=_POLL_SECONDS)
            return group
        except GetTimeoutError:
            if time.monotonic() > announce_at:
                announce_at = float("inf")
                print(_waiting_message(arguments), flush=True)
    return None


def _waiting_message(arguments: argparse.Namespace) -> str:
    free = {name: count for name, count in ray.available_resources().items() if ":" not in name}
    return (
        f"ray: waiting for {arguments.workers} x {json.dumps(arguments.bundle)} ({arguments.placement});"
        f" free on the cluster (nodes: {len(ray.nodes())}): {json.dumps(free)}"
    )


def start_worker(group: PlacementGroup, bundle: Mapping[str, float], index: int) -> Any:
    """Starts an actor in a bundle of a placement group."""
    custom = {name: count for name, count in bundle.items() if name not in ("CPU", "GPU")}
    return (
        ray.remote(Worker)
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=custom,
            max_concurrency=3,  # read_output blocks; start and signal run beside it
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        .remote()
    )


def assign_ranks(workers: Sequence[Any]) -> tuple[list[int], list[dict[str, str]]]:
    """The indices of the workers by rank, host by host; and the environment variables of each rank.

    Ranks on this host come first: the run ends if it is lost, and an elastic one if rank 0 is lost.
    """
    locations = ray.get([worker.location.remote() for worker in workers])
    job, local = ray.get_runtime_context().get_job_id(), ray.get_runtime_context().get_node_id()
    hosts: dict[str, list[int]] = {}
    for index in sorted(range(len(workers)), key=lambda index: locations[index][0] != local):
        hosts.setdefault(locations[index][0], []).append(index)
    first = next(iter(hosts.values()))[0]
    by_rank: list[int] = []
    variables: list[dict[str, str]] = []
    for node_rank, on_host in enumerate(hosts.values()):
        # Each rank sees the devices of all ranks on its host, and uses the one with its local rank.
        devices = ",".join(filter(None, (locations[index][2] for index in on_host)))
        for local_rank, index in enumerate(on_host):
            by_rank.append(index)
            variables.append(
                {
                    "RAY_JOB_ID": job,
                    "RAY_TRAIN_WORLD_SIZE": str(len(workers)),
                    "RAY_TRAIN_WORLD_RANK": str(len(variables)),
                    "RAY_TRAIN_LOCAL_RANK": str(local_rank),
                    "RAY_TRAIN_LOCAL_WORLD_SIZE": str(len(on_host)),
                    "RAY_TRAIN_NODE_RANK": str(node_rank),
                    "RAY_TRAIN_COORDINATOR": locations[first][1],
                    _DEVICES: devices,
                }
            )
    return by_rank, variables


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="isotrain.launchers.ray_main")
    parser.add_argument("--address", default="")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--bundle", type=json.loads, required=True)
    parser.add_argument("--placement", required=True)
    parser.add_argument("--elastic", type=json.loads, metavar="COMMAND")
    parser.add_argument("--replacements", type=int, default=0)
    parser.add_argument("-x", action="append", default=[], dest="variables", metavar="NAME")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def main() -> int:
    """Runs the command on every rank; returns the exit code."""
    arguments = _arguments()
    ray.init(arguments.address or None, log_to_driver=False)
    stop_request = StopRequest()  # after ray.init, which sets a signal handler of its own
    group = await_placement(arguments, stop_request)
    if group is None:
        return 128 + signal.SIGTERM
    bundle = arguments.bundle
    workers = [start_worker(group, bundle, index) for index in range(group.bundle_count)]
    by_rank, variables = assign_ranks(workers)
    common = {name: os.environ[name] for name in arguments.variables if name in os.environ}
    if arguments.elastic:
        common["ISOTRAIN_RAY_ELASTIC"] = "1"
    ranks = [workers[index] for index in by_rank]
    ray.get(
        [
            worker.start.remote(arguments.command, {**common, **of_rank})
            for worker, of_rank in zip(ranks, variables, strict=True)
        ]
    )
    if not arguments.elastic:
        return Ranks(ranks).follow(stop_request)

    def replace(rank: int) -> Any:
        """Starts a process that joins the run, in the bundle of a lost rank or of a lost one's successor."""
        worker = start_worker(group, bundle, by_rank[rank])
        by_rank.append(by_rank[rank])
        variables.append(variables[rank])
        worker.start.remote(arguments.elastic, {**common, **variables[rank]})
        return worker

    return Ranks(ranks, replace, arguments.replacements).follow(stop_request)


if __name__ == "__main__":
    sys.exit(main())
