"""Seconds of a step of two stages: by `torch.distributed.pipelining`, by hand, and by isotrain's `pipeline`.

    python -m benchmarks.pipelining --rounds 5

Schedule `2bw`, whose steps end without a flush, is beside `1f1b`, whose passes it has.
The ways take turns, so that what else the machine does falls on all; each is a run of processes of its own.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.sharded_runs import Step, by_hand, by_isotrain
from benchmarks.sharded_work import BATCH, LAYERS, RATE, REPLICAS, inputs, lines, model

STAGES, MICRO_BATCHES = REPLICAS, 8
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
REFERENCE = "torch.distributed.pipelining"


def by_pipeline(schedule: str, port: int) -> float:
    """The slowest process's seconds by isotrain."""
    middle = str(2 * (LAYERS // STAGES))
    options = {"stages": STAGES, "schedule": schedule, "cut": [middle]}
    return by_isotrain(
        1, {"name": "pipeline", "options": options}, gradient_accumulation_steps=MICRO_BATCHES
    )


def step_of(rank: int, schedule: str) -> Step:
    """A stage's step by torch's pipelining."""
    layers = list(model().children())
    each = len(layers) // STAGES
    own = nn.Sequential(*layers[rank * each : (rank + 1) * each])
    stage = PipelineStage(own, rank, STAGES, torch.device("cpu"))
    passes = SCHEDULES[schedule](stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(own.parameters(), lr=RATE)
    batches = torch.from_numpy(inputs()).split(BATCH)

    def step(number: int) -> None:
        batch = batches[number % len(batches)]
        optimizer.zero_grad()
        if rank == 0:
            passes.step(batch)
        else:
            passes.step(target=batch, losses=[])
        optimizer.step()

    return step


def main() -> None:
    """Prints for each schedule both times of a step, and the ratio of isotrain's to torch's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29671)
    given = parser.parse_args()
    ways: dict[str, Callable[[str, int], float]] = {
        REFERENCE: functools.partial(by_hand, step_of),
        "isotrain, pipeline": by_pipeline,
    }
    for place, schedule in enumerate(SCHEDULES):
        if schedule == "1f1b":
            ways["isotrain, pipeline, 2bw"] = lambda _, port: by_pipeline("2bw", port)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(given.rounds):
            for name, way in ways.items():
                port = given.port + len(SCHEDULES) * number + place
                seconds[name].append(way(schedule, port))
        print(schedule)
        for line in lines(seconds, REFERENCE):
            print(line)


if __name__ == "__main__":
    main()
