"""Stalls of training by checkpoints, of a model with 100 M parameters, beside what people use instead.

`python -m benchmarks.stall [--every N] [--saves N] [--samples N] [--rounds N] [--width N] [--way NAME ...]`:
one replica on torch, a checkpoint every N steps: by isotrain, in a loop by hand with `torch.save`, in one
with `torch.distributed.checkpoint.async_save`, and of a Keras model by `ModelCheckpoint`; each in a program
of its own, in an order drawn anew for every round. Printed are the seconds of a step while nothing is
written; of the call that saves, which training waits for, and as a part of a step; and by how much all steps
from one checkpoint to the next take longer than as many undisturbed ones, with what the writing beside them
takes of the processor. They are medians with their 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import isotrain
from benchmarks import statistics
from benchmarks.checkpoints import AsyncDistributedCheckpoint, Contender, Finish, TorchSave

_LAYERS = 25
_WARM = 3
"""Steps at the start that are not counted."""
_FREE = 5
"""Steps before the first checkpoint, which are undisturbed."""
Loop = tuple[Callable[[], float], Callable[[], Any]]
"""Takes a step, and gives its loss; and saves a checkpoint, while training goes on."""


@dataclass(frozen=True)
class Work:
    """The work of each program.

    Attributes:
        every: Steps from one checkpoint to the next.
        saves: Checkpoints that are counted.
        samples: Number of samples in the one batch of every step.
        width: Width of the layers, which have its square as parameters.
    """

    every: int = 50
    saves: int = 3
    samples: int = 64
    width: int = 2000

    @property
    def steps(self) -> int:
        """Number of steps of the whole program."""
        return _WARM + _FREE + self.every * (self.saves + 1)

    def batch(self) -> np.ndarray:
        """Inputs `[samples, width]`, which are the targets too."""
        drawn = np.random.default_rng(0).standard_normal((self.samples, self.width))
        return drawn.astype(np.float32)


def network(width: int) -> Any:
    import torch

    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
    return torch.nn.Sequential(*layers)


@contextmanager
def by_isotrain(work: Work, folder: Path) -> Iterator[Loop]:
    """A session's own loop."""
    inputs = work.batch()
    spec = {
        "model": {"torch": network},
        "model_args": {"width": work.width},
        "data": (inputs, inputs),
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.001},
        "global_batch_size": work.samples,
        "steps": work.steps + 1,
        "checkpoint": {"keep_last": 1, "folder": str(folder)},
    }
    with isotrain.open_session(spec, backend="torch-ddp", replicas=1) as session:
        batches: Any = session.batches()  # a generator, which can be closed
        with closing(batches):
            yield (
                lambda: float(session.step(next(batches))),
                lambda: session.save_if_due(best=True, overlap_next_step=True),
            )
        session.stop()


@contextmanager
def by_hand(work: Work, folder: Path, way: Callable[[], Contender]) -> Iterator[Loop]:
    """Loop by hand that begins a checkpoint only when the one before is complete."""
    import torch

    contender = way()
    contender.prepare({})
    inputs, model = torch.from_numpy(work.batch()), network(work.width)
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
        place = next(folders)
        place.mkdir()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        under_way.append(contender.save(state, place))

    yield step, save
    under_way.pop()()


@contextmanager
def by_keras(work: Work, folder: Path) -> Iterator[Loop]:
    """`ModelCheckpoint`, told after a batch as `fit` tells it."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    layers = [keras.layers.Dense(work.width, use_bias=False) for _ in range(_LAYERS)]
    model = keras.Sequential([keras.Input((work.width,)), *layers])
    model.compile(optimizer=keras.optimizers.SGD(0.001), loss="mean_squared_error")
    callback = keras.callbacks.ModelCheckpoint(folder / "newest.keras", save_freq=1)
    callback.set_model(model)
    callback.on_epoch_begin(0)
    inputs, done = work.batch(), itertools.count()
    yield (
        lambda: float(model.train_on_batch(inputs, inputs)),
        lambda: callback.on_train_batch_end(next(done), {}),
    )


WAYS: Mapping[str, Callable[[Work, Path], AbstractContextManager[Loop]]] = {
    "isotrain": by_isotrain,
    "by hand, torch.save": partial(by_hand, way=TorchSave),
    "by hand, distributed.checkpoint async": partial(by_hand, way=AsyncDistributedCheckpoint),
    "Keras ModelCheckpoint": by_keras,
}


def timed(name: str, work: Work) -> dict[str, list[float]]:
    """Measurements of one program, of each save but the first, which copies to new memory.

    Returns:
        Figures by column of the table: seconds, and parts of the program's own undisturbed step.
    """
    steps, calls, intervals = list[float](), list[float](), list[float]()
    with TemporaryDirectory(dir=".") as folder, WAYS[name](work, Path(folder)) as loop:
        step, save = loop
        began = time.perf_counter()
        for done in range(1 - _WARM, 1 + work.steps - _WARM):
            before = time.perf_counter()
            step()
            now = time.perf_counter()
            if 0 < done <= _FREE:
                steps.append(now - before)
            if done >= _FREE and (done - _FREE) % work.every == 0:
                intervals.append(now - began)
                began = now
                save()
                calls.append(time.perf_counter() - now)
    usual = float(np.median(steps))
    more = [each - work.every * usual for each in intervals[2:]]
    parts = [each / usual for each in calls[1:]], [each / usual / work.every for each in more]
    return dict(zip(COLUMNS, ([usual], calls[1:], parts[0], more, parts[1]), strict=True))


COLUMNS = ("step", "saving", "of a step", "longer", "of all steps")
_UNITS = (" s", " s", "", " s", "")


def main(given: argparse.Namespace) -> None:
    """Measures each way in turn, and prints."""
    work = Work(given.every, given.saves, given.samples, given.width)
    if given.alone:
        print(json.dumps(timed(given.alone, work)))
        return
    order = np.random.default_rng(0)
    found = {name: {column: list[float]() for column in COLUMNS} for name in given.way}
    for _ in range(given.rounds):
        for name in map(str, order.permutation(given.way)):
            for column, values in _in_a_program(name, work).items():
                found[name][column] += values
    print(f"a checkpoint every {work.every} steps")
    print(f"| way | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for name, own in found.items():
        cells = [
            statistics.median(np.array(own[column])).text(unit)
            for column, unit in zip(COLUMNS, _UNITS, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def _in_a_program(name: str, work: Work) -> dict[str, list[float]]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.stall", "--alone", name]
    for option, value in asdict(work).items():
        command += [f"--{option}", str(value)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for option, value in asdict(Work()).items():
        parser.add_argument(f"--{option}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--alone", choices=WAYS, help=argparse.SUPPRESS)  # of the programs
    main(parser.parse_args())
