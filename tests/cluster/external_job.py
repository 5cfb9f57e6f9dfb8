"""A small training that every rank of a scheduler runs: `external_job.py FOLDER BACKEND[,...] [LAUNCHER...]`.

Where launchers are named, it is run for each of them, as if that one had started the ranks that SLURM did.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
from cluster import simulated_schedulers

import isotrain

TOLD = ("ISOTRAIN_KEY", "ISOTRAIN_SPEC", "ISOTRAIN_TOLD")
"""Variables that ranks write down as they find them."""


def model() -> Any:
    import keras

    hidden = keras.layers.Dense(6, "tanh", name="hidden")
    return keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(2, name="head")])


def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.linspace(-1, 1, 4 * 30).reshape(30, 4)
    return inputs, np.sin(3 * inputs[:, :2])


def spec() -> dict[str, Any]:
    return {
        "name": "joined",
        "model": model,
        "data": data,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "global_batch_size": 8,
        "epochs": 2,
        "precision": "float64",
        "threads": 1,
        "device": "cpu",
        # Nothing is heard of a process while TensorFlow waits in it for its peers: long on a busy machine.
        "timeouts": {"silence": 60.0},
    }


def losses(folder: Path, backend: str, replicas: int | None = None) -> list[float]:
    """Trains, on as many processes as there are; gives the losses of all steps."""
    result = isotrain.run(
        spec(),
        backend=backend,
        replicas=replicas,
        output=folder / backend.replace(":", "-"),
        on_event=lambda event: None,
    )
    return [float(loss) for loss in result.history.loss]


def losses_by_launcher(
    folder: Path, backends: list[str], launchers: list[str]
) -> dict[str, list[float]]:
    """Losses of the same run under each launcher."""
    rank = int(os.environ["SLURM_PROCID"])
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        del os.environ[name]
    found = {}
    for launcher in launchers:
        told = simulated_schedulers.SCHEDULERS[launcher](rank)
        os.environ.update(told)
        for backend in backends:
            found[f"{launcher} {backend}"] = losses(folder / launcher, backend)
        for name in told:
            del os.environ[name]
    return found


def main() -> None:
    folder, backends, launchers = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    if launchers:
        found = losses_by_launcher(folder, backends, launchers)
    else:
        found = {backend: losses(folder, backend) for backend in backends}
    own = f"losses-of-{os.getpid()}-{socket.gethostname()}.json"
    told = {name: os.environ.get(name) for name in TOLD}
    rank = {"losses": found, "told": told, "host": socket.gethostname()}
    (folder / own).write_text(json.dumps(rank))


if __name__ == "__main__":
    main()
