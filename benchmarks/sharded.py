"""Seconds of a step with state whole and in parts, by hand, by isotrain and by Fabric, on two processes here.

    python -m benchmarks.sharded --rounds 5
    python -m benchmarks.sharded --rounds 5 --backend tf-multiworker

On TensorFlow, which takes no state apart itself, the way by hand is data-parallel. The ways take turns, so
that what else the machine does falls on all; each is a run of processes of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import environment
from benchmarks.peers.ports import free_ports
from benchmarks.sharded_runs import Step, by_hand, by_isotrain
from benchmarks.sharded_work import BATCH, RATE, REPLICAS, inputs, lines, model, portable_model

HANDS = ("by hand, DDP", "by hand, fully_shard")
FABRIC = "Fabric, fully_shard"
MIRRORED = "by hand, MultiWorkerMirrored"
STRATEGIES: dict[str, Any] = {
    "isotrain, data-parallel": "data-parallel",
    **{
        f"isotrain, sharded, stage {stage}": {
            "name": "sharded",
            "options": {"stage": stage, "bucket_megabytes": 5.0},
        }
        for stage in (1, 2, 3)
    },
}


def _wrapped(way: str, made: nn.Module) -> nn.Module:
    if way == HANDS[0]:
        return DistributedDataParallel(made, gradient_as_bucket_view=True)
    for layer in made.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(made)


def step_of(rank: int, way: str) -> Step:
    """A replica's step by hand."""
    wrapped = _wrapped(way, model())
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=RATE)
    own = torch.from_numpy(inputs()[rank::REPLICAS])

    def step(number: int) -> None:
        batch = own[number % 8 * BATCH // REPLICAS :][: BATCH // REPLICAS]
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(batch), batch).backward()
        optimizer.step()

    return step


def by_fabric() -> float:
    """The slowest process's seconds, in the environment of the peers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(environment.PYTHON), "-m", "benchmarks.sharded_by_fabric", folder]
        subprocess.run(command, check=True, capture_output=True)
        return max(float(file.read_text(encoding="ascii")) for file in Path(folder).iterdir())


def by_tensorflow() -> float:
    """The slowest process's seconds, of two that meet where ports are free."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(REPLICAS)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.sharded_by_tensorflow", folder]
        started = [
            subprocess.Popen(command, env=_as_worker(workers, rank), stdout=subprocess.DEVNULL)
            for rank in range(REPLICAS)
        ]
        try:
            if any(process.wait() for process in started):
                raise RuntimeError("a process by hand failed: its error is above")
        finally:
            for process in started:
                process.kill()
        return max(float(file.read_text(encoding="ascii")) for file in Path(folder).iterdir())


def _as_worker(workers: list[str], rank: int) -> dict[str, str]:
    """The environment of one thread on CPUs, as isotrain's replicas have."""
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    threads = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
    return {
        **os.environ,
        **dict.fromkeys(threads, "1"),
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "TF_CONFIG": json.dumps(task),
    }


Ways = dict[str, Callable[[int], float]]
"""Functions by name, each from a port to seconds."""


def _of_torch() -> Ways:
    ways: Ways = {
        **{name: functools.partial(by_hand, step_of, name) for name in HANDS},
        **{name: _by_isotrain(strategy) for name, strategy in STRATEGIES.items()},
    }
    if environment.PYTHON.exists():
        ways[FABRIC] = lambda port: by_fabric()
    else:
        print(f"{FABRIC} is left out: `python -m benchmarks.peers --setup` makes its environment")
    return ways


def _of_tensorflow() -> Ways:
    options: dict[str, Any] = {"backend": "tf-multiworker", "model": portable_model}
    ways: Ways = {MIRRORED: lambda port: by_tensorflow()}
    return ways | {n: _by_isotrain(strategy, **options) for n, strategy in STRATEGIES.items()}


def _by_isotrain(strategy: Any, **options: Any) -> Callable[[int], float]:
    return lambda port: by_isotrain(REPLICAS, strategy, **options)


def main() -> None:
    """Prints a line for each way: of a step its time, and the ratio to one by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29871)
    parser.add_argument("--backend", choices=["torch-ddp", "tf-multiworker"], default="torch-ddp")
    given = parser.parse_args()
    is_torch = given.backend == "torch-ddp"
    ways = _of_torch() if is_torch else _of_tensorflow()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds):
        for place, (name, way) in enumerate(ways.items()):
            seconds[name].append(way(given.port + len(ways) * number + place))
    held_to = ("isotrain, sharded, stage 3",) if is_torch else ()
    for line in lines(seconds, HANDS[1] if is_torch else MIRRORED, held_to):
        print(line)


if __name__ == "__main__":
    main()
