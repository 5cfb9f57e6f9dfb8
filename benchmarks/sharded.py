"""Seconds of a step with state whole and in parts, by hand and by isotrain, on two processes of this machine.

    python -m benchmarks.sharded --rounds 5

The ways take turns, so that what else the machine does falls on all; each is a run of processes of its own.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isotrain
from benchmarks.statistics import median

WIDTH, LAYERS, BATCH, REPLICAS = 1024, 6, 128, 2
WARM, TIMED = 5, 20
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


def model() -> nn.Module:
    """Wide layers: exchanging them takes as long as computing with them."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def data() -> isotrain.DataSet:
    """Noise."""
    inputs = np.random.default_rng(0).standard_normal((8 * BATCH, WIDTH), "float32")
    return isotrain.DataSet((inputs, inputs))


def timed(steps: Iterator[Callable[[], Any]]) -> float:
    """Seconds of a step, of those after the first few."""
    for _ in range(WARM):
        next(steps)()
    began = time.perf_counter()
    for _ in range(TIMED):
        next(steps)()
    return (time.perf_counter() - began) / TIMED


def of_session(session: isotrain.Session) -> float:
    """A run's work."""
    return timed(functools.partial(session.step, batch) for batch in session.batches())


def by_isotrain(strategy: Any) -> float:
    """The slowest process's seconds."""
    spec = {
        "model": {"torch": model},
        "data": data,
        "loss": "mean_squared_error",
        "optimizer": {"name": "adam", "lr": 0.001},
        "global_batch": BATCH,
        "steps": WARM + TIMED,
        "threads": 1,
        "strategy": strategy,
        "evaluation": {"every_epochs": 0},
    }
    found = isotrain.launch(of_session, spec, backend="torch-ddp", replicas=REPLICAS)
    return float(max(found))


def _wrapped(way: str, made: nn.Module) -> nn.Module:
    if way == "by hand, DDP":
        return DistributedDataParallel(made, gradient_as_bucket_view=True)
    for layer in made.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(made)


def _process(rank: int, way: str, port: int, found: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=REPLICAS)
    wrapped = _wrapped(way, model())
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.001)
    own = torch.from_numpy(data().train[0][rank::REPLICAS])

    def step(place: int) -> None:
        batch = own[place * BATCH // REPLICAS :][: BATCH // REPLICAS]
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(batch), batch).backward()
        optimizer.step()

    found[rank] = timed(functools.partial(step, n % 8) for n in range(WARM + TIMED))
    dist.barrier()


def by_hand(way: str, port: int) -> float:
    """The slowest process's seconds."""
    found = mp.get_context("spawn").Manager().dict()
    mp.spawn(_process, (way, port, found), nprocs=REPLICAS)
    return float(max(found.values()))


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29871)
    given = parser.parse_args()
    hands = ("by hand, DDP", "by hand, fully_shard")
    seconds: dict[str, list[float]] = {name: [] for name in (*hands, *STRATEGIES)}
    for number in range(given.rounds):
        for place, name in enumerate(hands):
            seconds[name].append(by_hand(name, given.port + 2 * number + place))
        for name, strategy in STRATEGIES.items():
            seconds[name].append(by_isotrain(strategy))
    for name, found in seconds.items():
        print(f"{name:30} {median(1e3 * np.array(found)).text(' ms', 1)}")


if __name__ == "__main__":
    main()
