"""Parts of a torch step and their time: by hand and by isotrain, each in a program of its own.

    python -m benchmarks.steps                          # the MLP of 64, one thread
    python -m benchmarks.steps --workload cnn --threads 2 --rounds 10 --clock processor

All train a workload of `benchmarks.peers` on one replica: by hand, and in isotrain a native and a portable
model. The same moments are noted in all, by hooks of torch, which take some microseconds; a portable model is
not called in most of its steps, so that only the weights' hooks tell of those. Printed are medians over the
rounds, with 95 % bootstrap intervals, of the medians over the timed steps.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import isotrain
from benchmarks.peers import machine
from benchmarks.peers.job import CLOCKS
from benchmarks.peers.programs import with_isotrain
from benchmarks.peers.workloads import MOMENTUM, WORKLOADS
from benchmarks.statistics import median

PARTS = (
    "next batch",
    "until the model is called",
    "model",
    "loss, and its gradient",
    "gradients of the weights",
    "these four",
    "update, until the next batch is asked for",
    "whole step",
)
"""Parts of a step; by hand, gradients are set to zero in the second, and the last but one only updates."""
_NOTED = 7
"""Moments of a step."""


class Moments:
    """Notes when each part of a step has ended.

    Args:
        weights: Weights in the order of the layers.
        clock: Name of a clock of `CLOCKS`.
        model: Torch module called in every step; None where there is none, and the parts between are unknown.
    """

    def __init__(self, weights: Iterable[Any], clock: str, model: Any | None = None) -> None:
        self._now = CLOCKS[clock]
        self._step = [np.nan] * _NOTED
        self._steps: list[list[float]] = []
        if model is not None:
            model.register_forward_pre_hook(self._note(2))
            model.register_forward_hook(self._called)
        for weight in itertools.islice(
            weights, 2
        ):  # of the first layer: the last to have gradients
            weight.register_post_accumulate_grad_hook(self._note(5))

    def _note(self, place: int) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self._step[place] = self._now()

        return note

    def _called(self, model: Any, inputs: Any, output: Any) -> None:
        output.register_hook(self._note(4))
        self._step[3] = self._now()

    def of(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches; a step ends when the next one is asked for."""
        iterator = iter(batches)
        end = object()
        while True:
            self._step[0] = self._now()
            if (batch := next(iterator, end)) is end:
                return
            self._step[1] = self._now()
            yield batch
            self._step[6] = self._now()
            self._steps.append(self._step.copy())

    def medians(self, left_out: int) -> list[float]:
        """Microseconds of each of `PARTS`; the first steps are left out."""
        steps = np.array(self._steps[left_out:]) * 1e6
        each = np.diff(steps)
        several, whole = steps[:, 5] - steps[:, 1], steps[:, -1] - steps[:, 0]
        parts = np.column_stack([each[:, :5], several, each[:, 5], whole])
        medians: list[float] = np.median(parts, axis=0).tolist()
        return medians


def by_hand(workload: str, threads: int, clock: str) -> list[float]:
    """The loop that the documentation of torch shows; gives what `Moments` does."""
    import torch

    from benchmarks.peers import torch_data, torch_models

    work = WORKLOADS[workload]
    torch.set_num_threads(threads)
    model = torch_models.build(work)
    optimizer = torch.optim.SGD(model.parameters(), work.rate, MOMENTUM)
    loss_function = torch.nn.CrossEntropyLoss()
    moments = Moments(model.parameters(), clock, model)
    for inputs, targets in moments.of(torch_data.in_memory(work, 0, 1)):
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return moments.medians(work.first_steps)


def by_isotrain(workload: str, threads: int, clock: str, is_native: bool = True) -> list[float]:
    """The same by a session, of a native or a portable model."""
    train = functools.partial(_by_session, workload=workload, clock=clock, is_native=is_native)
    spec = with_isotrain.spec(workload, threads, native=is_native, on_torch=True)
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        medians: list[float] = isotrain.launch(
            train, spec, backend="torch-ddp", replicas=1, output=run, on_event=_keep_silent
        )[0]
    return medians


def _keep_silent(event: Any) -> None:
    """Standard output is for the result."""


def _by_session(
    session: isotrain.Session, workload: str, clock: str, is_native: bool
) -> list[float]:
    model: Any = session.group.model
    if is_native:
        moments = Moments(model.parameters(), clock, model)
    else:
        moments = Moments((each.value for each in model.trainable_variables), clock)
    for batch in moments.of(session.batches()):
        session.step(batch)
    return moments.medians(WORKLOADS[workload].first_steps)


SIDES: dict[str, Callable[..., list[float]]] = {
    "by hand": by_hand,
    "native": by_isotrain,
    "portable": functools.partial(by_isotrain, is_native=False),
}


def measured(side: str, given: argparse.Namespace) -> list[float]:
    """Measurements of one of `SIDES`, in a process of its own."""
    asked = ["--workload", given.workload, "--threads", str(given.threads), "--clock", given.clock]
    command = [sys.executable, "-m", "benchmarks.steps", *asked, "--side", side]
    variables = os.environ | {
        "OMP_NUM_THREADS": str(given.threads),
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    medians: list[float] = json.loads(done.stdout)
    return medians


def table(found: dict[str, np.ndarray]) -> str:
    """Table of microseconds by side, each of shape `[rounds, parts]`; empty where a part is unknown."""
    hand, native, portable = (found[side] for side in SIDES)
    columns = (hand, native, native - hand, portable, portable - native)
    heads = ("part of a step, µs", "by hand", "native", "more", "portable", "more than native")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for place, part in enumerate(PARTS):
        known = (column[:, place] for column in columns)
        texts = ["" if np.isnan(each).any() else median(each).text(digits=0) for each in known]
        lines.append(f"| {part} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=list(WORKLOADS), default="mlp-64")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the three")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        print(json.dumps(SIDES[given.side](given.workload, given.threads, given.clock)))
        return
    order = np.random.default_rng(given.seed)
    found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for _ in range(given.rounds):
        for side in order.permutation(list(SIDES)).tolist():
            found[side].append(measured(side, given))
    facts = machine.described(given.seed) | {"rounds": str(given.rounds), "clock": given.clock}
    print("; ".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"\n{given.workload}, threads: {given.threads}\n")
    print(table({side: np.array(medians) for side, medians in found.items()}))


if __name__ == "__main__":
    main()
