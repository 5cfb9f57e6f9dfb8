"""A script as a person starts it with `torchrun` or `srun`: the same on every rank."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import isotrain
from isotrain.strategies.data_parallel import DataParallel
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

STEP = 3
HEARD_SECONDS = 0.5
"""Until then rank 0 knows at which step this process is."""


def network() -> Network:
    return Network([Dense(4, 2)])


def portable() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


MODEL = {"numpy": network, "torch": portable, "tensorflow": portable}


def data() -> isotrain.DataSet:
    """Data of the length that this rank was given: differing lengths must be noticed.

    They are there once the file `DATA_AFTER` is, if that is set.
    """
    while not Path(os.environ.get("DATA_AFTER", ".")).exists():
        time.sleep(0.05)
    asked = json.loads(sys.argv[1]) if sys.argv[1:2] and sys.argv[1].startswith("{") else {}
    samples = asked.get("samples", {}).get(
        os.environ.get("RANK", os.environ.get("SLURM_PROCID")), int(os.environ.get("SAMPLES", "64"))
    )
    inputs = np.linspace(-1, 1, 4 * samples).reshape(samples, 4)
    return isotrain.DataSet((inputs, inputs[:, :2]), (inputs, inputs[:, :2]))


def spec(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": "rendezvous", "model": MODEL, "data": data, "threads": 1}
    fields |= {"loss": "mean_squared_error", "optimizer": {"name": "sgd", "lr": 0.125}}
    fields |= {"global_batch_size": 8, "epochs": 2, "precision": "float64"}
    return fields | {"plugins": ["isotrain.testing.reference"]} | changes


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def crash() -> None:
    os.write(2, b"native code says why\n")
    faulthandler._sigsegv()


def raise_error() -> None:
    raise ValueError("a deliberate mistake")


def hang() -> None:
    time.sleep(600)


class AwaitsNewcomer:
    """Callback that awaits a process that joins after `STEP`; few steps are taken before it has joined.

    Nor are any then while the working directory has a file `hold`.
    """

    starts = 0

    def on_start(self, session: isotrain.Session) -> None:
        AwaitsNewcomer.starts += 1

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if session.rank or batch.step < STEP:
            return
        if AwaitsNewcomer.starts > 1:
            while Path("hold").exists():
                time.sleep(0.05)
            return
        events = session.run_directory / "events.jsonl"
        while '"waiting"' not in events.read_text():
            time.sleep(0.05)
        time.sleep(0.5)


class Holds:
    """Callback that takes no step after `STEP` while the working directory has a file `hold`."""

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        while not session.rank and batch.step >= STEP and Path("hold").exists():
            time.sleep(0.05)


FAULT_ACTIONS = {deed.__name__: deed for deed in (kill, stop, crash, raise_error, hang)}


def work(session: isotrain.Session) -> Any:
    """A loop in which a rank may do something bad; gives its part of what is compared."""
    asked = json.loads(sys.argv[1])
    for batch in session.batches():
        session.step(batch)
        if session.rank == asked.get("rank") and batch.step == STEP:
            time.sleep(HEARD_SECONDS)
            Path(asked["moment"]).touch()
            FAULT_ACTIONS[asked["deed"]]()
        time.sleep(asked.get("pause", 0))
    print("printed by rank", session.rank)
    return {"rank": session.rank, "loss": session.last_loss, **session.read_state()}


def shown(returned: dict[str, Any]) -> str:
    """Loss and weights in a line, to the bit."""
    parts = {name: np.asarray(part).tolist() for name, part in returned.items() if name != "rank"}
    return json.dumps(parts)


def main() -> None:
    asked = json.loads(sys.argv[1])
    fields = spec(**asked.get("spec", {}))
    own = asked.get("of", {}).get(os.environ.get("RANK", os.environ.get("SLURM_PROCID")), {})
    where = {"backend": asked["backend"], "output": asked["run"]}
    made: list[DataParallel] = []
    with mock.patch.object(DataParallel, "__init__", lambda self: made.append(self)):
        returned = isotrain.launch(work, {**fields, **own}, on_event=lambda event: None, **where)
    assert len(made) == 1, "the strategy is made once, though this process plans and trains"
    assert [each["rank"] for each in returned] == list(range(len(returned)))
    print(
        json.dumps(
            {
                n: v.tolist() if hasattr(v, "tolist") else v
                for n, v in returned[0].items()
                if n != "rank"
            }
        )
    )


if __name__ == "__main__":
    main()
