"""How long checkpoints hold up the training of a model with 100 M parameters, beside a loop by hand.

`python -m benchmarks.stall [--every N] [--saves N] [--samples N] [--rounds N]`: one replica on torch, a
checkpoint every N steps: by isotrain, and in a loop by hand with `torch.distributed.checkpoint.async_save`,
each in a program of its own, in turn. Printed are the medians of the steps while nothing is written; of how
long the loop waits in the call that saves; and by how much all steps from one checkpoint to the next take
longer than as many undisturbed ones, with what the writing beside them takes of the processor. The last two
as parts of a step, and of all steps from one checkpoint to the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import isotrain
from benchmarks.checkpoints import AsyncDistributedCheckpoint, Finish

_WIDTH, _LAYERS = 2000, 25
_WARM = 3
"""Steps at the start that are not counted."""
_FREE = 5
"""Steps before the first checkpoint, which are undisturbed."""
Loop = tuple[Callable[[], float], Callable[[], Any]]
"""Takes a step, and gives its loss; and saves a checkpoint, while training goes on."""


def network() -> Any:
    import torch

    layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)]
    return torch.nn.Sequential(*layers)


def samples(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, _WIDTH)).astype(np.float32)


@contextmanager
def by_isotrain(count: int, steps: int, folder: Path) -> Iterator[Loop]:
    """A session's own loop."""
    inputs = samples(count)
    spec = {
        "model": {"torch": network},
        "data": (inputs, inputs),
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.001},
        "global_batch": count,
        "steps": steps,
        "checkpoint": {"keep_last": 1, "folder": str(folder)},
    }
    with isotrain.open_session(spec, backend="torch-ddp", replicas=1) as session:
        batches: Any = session.batches()  # a generator, which can be closed
        with closing(batches):
            yield (
                lambda: float(session.step(next(batches))),
                lambda: session.save_if_due(best=True, beside_step=True),
            )
        session.stop()


@contextmanager
def by_hand(count: int, steps: int, folder: Path) -> Iterator[Loop]:
    """What people write, who wait for the checkpoint before to be there when they begin the next one."""
    import torch

    way = AsyncDistributedCheckpoint()
    way.prepare({})
    inputs, model = torch.from_numpy(samples(count)), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    under_way: list[Finish] = []
    folders = (folder / str(number) for number in itertools.count())

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def save() -> None:
        while under_way:
            under_way.pop()()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        under_way.append(way.save(state, next(folders)))

    yield step, save
    under_way.pop()()


WAYS = {"isotrain": by_isotrain, "by hand, distributed.checkpoint async": by_hand}
PARTS = ("steps", "calls", "intervals")


def timed(name: str, every: int, saves: int, count: int) -> dict[str, list[float]]:
    """Seconds of undisturbed steps, of calls that save, and from each of these to the next."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    steps = _WARM + _FREE + every * (saves + 1)
    with TemporaryDirectory(dir=".") as folder, WAYS[name](count, steps + 1, Path(folder)) as loop:
        step, save = loop
        began = time.perf_counter()
        for done in range(1 - _WARM, 1 + steps - _WARM):
            before = time.perf_counter()
            step()
            now = time.perf_counter()
            if 0 < done <= _FREE:
                found["steps"].append(now - before)
            if done >= _FREE and (done - _FREE) % every == 0:
                found["intervals"].append(now - began)
                began = now
                save()
                found["calls"].append(time.perf_counter() - now)
    found["calls"] = found["calls"][1:]  # the first copy goes to new memory
    found["intervals"] = found["intervals"][2:]
    return found


def told(name: str, found: dict[str, list[float]], every: int) -> str:
    """What was found, as people read it."""
    step, call, interval = (statistics.median(found[part]) for part in PARTS)
    more = interval - every * step
    lines = [f"{name}: step {step:.3f} s; a checkpoint every {every} steps"]
    for what, seconds in (("the loop waits", call), ("all steps together take longer", more)):
        part = f"{seconds / step:.0%} of a step, {seconds / step / every:.1%} of {every} steps"
        lines.append(f"    {what}: {seconds:.3f} s, {part}")
    return "\n".join(lines)


def main(given: argparse.Namespace) -> None:
    """Measures each way in turn, and prints."""
    if given.way:
        print(json.dumps(timed(given.way, given.every, given.saves, given.samples)))
        return
    found = {name: {part: list[float]() for part in PARTS} for name in WAYS}
    for name in [*WAYS] * given.rounds:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.stall", "--way", name]
        for option in ("every", "saves", "samples"):
            command += [f"--{option}", str(getattr(given, option))]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        for part, seconds in json.loads(done.stdout.splitlines()[-1]).items():
            found[name][part] += seconds
    for name, own in found.items():
        print(told(name, own, given.every))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of the programs
    main(parser.parse_args())
