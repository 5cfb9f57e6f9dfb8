"""Seconds of a step of two stages: by `torch.distributed.pipelining`, by hand, and by isotrain's `pipeline`.

    python -m benchmarks.pipelining --rounds 5

The ways take turns, so that what else the machine does falls on all; each is a run of processes of its own.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import isotrain
from benchmarks.sharded_work import BATCH, LAYERS, STEPS, inputs, lines, model, timed

STAGES, MICRO_BATCHES = 2, 8
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
REFERENCE = "torch.distributed.pipelining"


def data() -> isotrain.DataSet:
    """Noise."""
    return isotrain.DataSet((inputs(), inputs()))


def of_session(session: isotrain.Session) -> float:
    """A run's work."""
    return timed(functools.partial(session.step, batch) for batch in session.batches())


def by_isotrain(port: int, schedule: str) -> float:
    """The slowest process's seconds; isotrain chooses its ports itself."""
    middle = str(2 * (LAYERS // STAGES))
    options = {"stages": STAGES, "schedule": schedule, "cut": [middle]}
    spec = {
        "model": {"torch": model},
        "data": data,
        "loss": "mean_squared_error",
        "optimizer": {"name": "adam", "lr": 0.001},
        "global_batch": BATCH,
        "accumulate": MICRO_BATCHES,
        "steps": STEPS,
        "threads": 1,
        "strategy": {"name": "pipeline", "options": options},
        "evaluation": {"every_epochs": 0},
    }
    return float(max(isotrain.launch(of_session, spec, backend="torch-ddp", replicas=1)))


def _process(rank: int, schedule: str, port: int, found: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=STAGES)
    layers = list(model().children())
    each = len(layers) // STAGES
    own = nn.Sequential(*layers[rank * each : (rank + 1) * each])
    stage = PipelineStage(own, rank, STAGES, torch.device("cpu"))
    passes = SCHEDULES[schedule](stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(own.parameters(), lr=0.001)
    batches = torch.from_numpy(inputs()).split(BATCH)

    def step(number: int) -> None:
        batch = batches[number % len(batches)]
        optimizer.zero_grad()
        if rank == 0:
            passes.step(batch)
        else:
            passes.step(target=batch, losses=[])
        optimizer.step()

    found[rank] = timed(functools.partial(step, number) for number in range(STEPS))
    dist.barrier()


def by_torch(port: int, schedule: str) -> float:
    """The slowest process's seconds."""
    found = mp.get_context("spawn").Manager().dict()
    mp.spawn(_process, (schedule, port, found), nprocs=STAGES)
    return float(max(found.values()))


def main() -> None:
    """Prints for each schedule both times of a step, and the ratio of isotrain's to torch's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29671)
    given = parser.parse_args()
    ways: dict[str, Callable[..., float]] = {REFERENCE: by_torch, "isotrain, pipeline": by_isotrain}
    for place, schedule in enumerate(SCHEDULES):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(given.rounds):
            for name, way in ways.items():
                port = given.port + len(SCHEDULES) * number + place
                seconds[name].append(way(port, schedule=schedule))
        print(schedule)
        for line in lines(seconds, REFERENCE):
            print(line)


if __name__ == "__main__":
    main()
