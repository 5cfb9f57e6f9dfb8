"""How long checkpoints hold up the training of a model with 100 M parameters.

`python -m benchmarks.stall [--every N] [--saves N] [--samples N]`: one replica on torch, a checkpoint every N
steps. Printed are the median of the steps while nothing is written; how long the loop waits in the call that
saves; and by how much all steps from one checkpoint to the next take longer than as many
undisturbed ones, with what the writing beside them takes of the processor. The last two as parts of a step,
and of all steps from one checkpoint to the next.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import isotrain

_WIDTH, _LAYERS = 2000, 25
_WARM = 3
"""Steps at the start that are not counted."""
_FREE = 5
"""Steps before the first checkpoint, which are undisturbed."""


def network() -> Any:
    import torch

    layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)]
    return torch.nn.Sequential(*layers)


def timed(session: isotrain.Session, every: int, saves: int) -> tuple[list[float], ...]:
    """Seconds of each undisturbed step, of each call that saves, and from each checkpoint to the next."""
    free, calls, intervals = list[float](), list[float](), list[float]()
    began = time.perf_counter()
    for batch in session.batches():
        before = time.perf_counter()
        float(session.step(batch))
        done = session.steps_done - _WARM
        if 0 < done <= _FREE:
            free.append(time.perf_counter() - before)
        if done >= _FREE and (done - _FREE) % every == 0:
            now = time.perf_counter()
            intervals.append(now - began)
            began = now
            session.save_if_due(best=True, beside_step=True)
            calls.append(time.perf_counter() - now)
        if len(calls) > saves:
            break
    session.stop()
    return free, calls[1:], intervals[2:]  # the first copy goes to new memory


def main(every: int, saves: int, samples: int) -> None:
    """Measures and prints."""
    inputs = np.random.default_rng(0).standard_normal((samples, _WIDTH)).astype(np.float32)
    with TemporaryDirectory(dir=".") as folder:
        spec = {
            "model": {"torch": network},
            "data": (inputs, inputs),
            "loss": "mean_squared_error",
            "optimizer": {"name": "sgd", "lr": 0.001},
            "global_batch": samples,
            "steps": _WARM + _FREE + every * (saves + 1) + 1,
            "checkpoint": {"keep_last": 1, "folder": str(Path(folder, "kept"))},
        }
        with isotrain.open_session(spec, backend="torch-ddp", replicas=1) as session:
            free, calls, intervals = timed(session, every, saves)
    step, call = statistics.median(free), statistics.median(calls)
    more = statistics.median(intervals) - every * step
    print(f"step {step:.3f} s; a checkpoint every {every} steps, {len(calls)} of them")
    for name, seconds in (("the loop waits", call), ("all steps together take longer", more)):
        print(f"{name}: {seconds:.3f} s, {seconds / step:.0%} of a step,", end=" ")
        print(f"{seconds / step / every:.1%} of {every} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    given = parser.parse_args()
    main(given.every, given.saves, given.samples)
