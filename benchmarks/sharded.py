"""Seconds of a step with state whole and in parts, by hand, by isotrain and by Fabric, on two processes here.

    python -m benchmarks.sharded --rounds 5

The ways take turns, so that what else the machine does falls on all; each is a run of processes of its own.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import environment
from benchmarks.sharded_runs import Step, by_hand, by_isotrain
from benchmarks.sharded_work import BATCH, REPLICAS, inputs, lines, model

HANDS = ("by hand, DDP", "by hand, fully_shard")
FABRIC = "Fabric, fully_shard"
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
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.001)
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


def _by_isotrain(strategy: Any) -> Callable[[int], float]:
    return lambda port: by_isotrain(REPLICAS, strategy)


def main() -> None:
    """Prints a line for each way: of a step its time, and the ratio to that by hand with fully_shard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29871)
    given = parser.parse_args()
    ways: dict[str, Callable[[int], float]] = {
        **{name: functools.partial(by_hand, step_of, name) for name in HANDS},
        **{name: _by_isotrain(strategy) for name, strategy in STRATEGIES.items()},
    }
    if environment.PYTHON.exists():
        ways[FABRIC] = lambda port: by_fabric()
    else:
        print(f"{FABRIC} is left out: `python -m benchmarks.peers --setup` makes its environment")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds):
        for place, (name, way) in enumerate(ways.items()):
            seconds[name].append(way(given.port + len(ways) * number + place))
    for line in lines(seconds, HANDS[1], ("isotrain, sharded, stage 3",)):
        print(line)


if __name__ == "__main__":
    main()
