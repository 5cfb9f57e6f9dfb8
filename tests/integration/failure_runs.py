"""Runs in which a rank fails at a certain step, and what is expected of every such run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from helpers.leftover_processes import is_alive

import isotrain
from isotrain.core.errors import RunFailedError
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEP = 3
Deed = Any


def model() -> Network:
    return Network([Dense(4, 2)])


def portable() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def of_torch() -> Any:
    import torch

    return torch.nn.Linear(4, 2)


MODELS = {"numpy": model, "torch": of_torch, "tensorflow": portable}


def data() -> Any:
    inputs = np.linspace(-1, 1, 256, dtype="float32").reshape(64, 4)
    return isotrain.DataSet((inputs, inputs[:, :2]), (inputs, inputs[:, :2]))


def spec(**changes: Any) -> dict[str, Any]:
    fields = {"name": "failing", "model": MODELS, "data": data, "loss": "mean_squared_error"}
    fields |= {"optimizer": {"name": "sgd", "lr": 0.125}, "global_batch_size": 8, "steps": 100_000}
    return fields | changes


def start_children(folder: Path, rank: int) -> None:
    """What a rank may have started: a plain child, and one that left its session and lost its parent."""
    script = (
        "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL,"
        " start_new_session=True).pid)"
    )
    child = subprocess.Popen(["sleep", "600"])
    orphan = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True
    )
    (folder / f"children-{rank}").write_text(f"{child.pid} {orphan.stdout}")


def doing(deed: Deed, rank: int) -> Any:
    """A training loop in which `rank` does something bad after step number STEP."""

    def work(session: Any) -> None:
        start_children(session.run_directory, session.rank)
        for batch in session.batches():
            session.step(batch)
            if session.rank == rank and batch.step == STEP:
                (session.run_directory / "moment").touch()
                deed()

    return work


def failure(
    work: Any,
    fields: Mapping[str, Any],
    backend: str,
    folder: Path,
    on_event: Callable[[Any], None] = lambda _: None,
) -> str:
    """Error text of a run that fails; no process of it is left then."""
    with pytest.raises(RunFailedError) as caught:
        isotrain.launch(work, fields, backend=backend, replicas=2, output=folder, on_event=on_event)
    assert not alive_children(folder)
    return str(caught.value)


def alive_children(folder: Path) -> list[int]:
    text = " ".join(path.read_text() for path in folder.glob("children-*"))
    return [pid for pid in map(int, text.split()) if is_alive(pid)]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_error() -> None:
    raise ValueError("a deliberate mistake")


def exit_3() -> None:
    sys.exit(3)


def exit_at_once() -> None:
    os._exit(3)


def exit_as_frameworks_do() -> None:
    os._exit(1)


def abort() -> None:
    os.abort()
