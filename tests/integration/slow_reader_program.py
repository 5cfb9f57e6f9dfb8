"""Trains more steps than a pipe can hold events of, and prints more than a terminal holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import isotrain
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

STEPS = 4000
PRINTED_EACH = 2
SPEC: dict[str, Any] = {
    "name": "slow-reader",
    "data": "integration.slow_reader_program:data",
    "model": "integration.slow_reader_program:network",
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.01},
    "global_batch_size": 4,
    "steps": STEPS,
    "plugins": ["isotrain.testing.reference"],
}


def network() -> Network:
    return Network([Dense(2, 1)])


def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(3).standard_normal((64, 2))
    return inputs, inputs[:, :1]


def work(session: isotrain.Session) -> int:
    (session.run_directory.parent / f"begun-{session.rank}").touch()
    for batch in session.batches():
        session.step(batch)
        if session.is_main and batch.step % PRINTED_EACH == 0:
            print(f"step {batch.step} is done, and takes a line of its own to say so", flush=True)
    (session.run_directory.parent / f"trained-{session.rank}").touch()
    return session.rank


if __name__ == "__main__":
    found = isotrain.launch(
        work, SPEC, backend="reference", replicas=2, output=Path(sys.argv[1]) / "run"
    )
    print(f"returned {found}")
