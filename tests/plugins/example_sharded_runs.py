"""Sharded runs on the backend that is given: saved in parts, and gone on with in other ways."""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from integration import sharded_cases as cases

import isotrain
from isotrain.core.running.session import Session
from isotrain.testing.launching import attempt
from isotrain.testing.series import PATIENT

REPLICAS = 3
WIDTH = 255
SAMPLES, GLOBAL_BATCH = 20, 6
"""Even batches over 3 replicas, and a last one that leaves a replica empty; over 2, all are even."""


def model() -> Any:
    """Weights that 3 replicas share evenly, with padding, with nothing left for the last, and not at all.

    Nobody listens to the normalisation.
    """
    import keras
    from keras import layers

    inputs = keras.Input((6,))
    hidden = layers.Dense(WIDTH, activation="tanh", name="hidden")(inputs)
    narrow = layers.Dense(4, activation="tanh", name="narrow")(hidden)
    unheard = layers.Rescaling(0.0)(layers.BatchNormalization(name="statistics")(inputs))
    outputs = layers.Dense(2, name="head")(layers.Concatenate()([narrow, unheard]))
    return keras.Model(inputs, outputs)


def data() -> isotrain.DataSet:
    generator = np.random.default_rng(29)
    inputs = generator.normal(size=(SAMPLES + 6, 6))
    targets = np.sin(inputs[:, :2])
    return isotrain.DataSet((inputs[:-6], targets[:-6]), (inputs[-6:], targets[-6:]))


SPEC: dict[str, Any] = {
    "model": model,
    "data": data,
    "loss": "mean_squared_error",
    "global_batch": GLOBAL_BATCH,
    "epochs": 2,
    "precision": "float64",
    "threads": 1,
    "timeouts": PATIENT,
    **cases.OPTIMIZERS[cases.LAST],
    "accumulate": 1,
}


def spec(strategy: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Of a run."""
    return cases.spec(strategy, SPEC, **changes)


def work(session: Session, folder: str) -> dict[str, Any]:
    """Trains in stage 3, and saves in the middle."""
    cases.stopped(session)
    found = {"bytes": {"here": live_bytes(), **described_bytes(session)}}
    described = session.group.describe_state().items()
    found["parts"] = {name: [info.offset, info.part] for name, info in described}
    session.save(folder)
    session.evaluate()  # brings all weights together, which go again in the next step
    return {**found, "ended": ended(session)}


def ended(session: Session) -> dict[str, Any]:
    """What is left of it ends with."""
    found = cases.trained(session)
    return {kind: found[kind] for kind in ("losses", "evaluation", "weights")}


def live_bytes() -> int:
    """Of all arrays that this process's device has."""
    import jax

    gc.collect()  # of what no longer counts, cycles may still have some
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


def described_bytes(session: Session) -> dict[str, int]:
    """Of model and slots: on this replica, and all."""
    described = session.group.describe_state().values()
    return {
        "told": sum(info.nbytes for info in described),
        "all": sum(info.whole_bytes for info in described),
    }


def found(backend: str, folder: str) -> list[dict[str, Any]]:
    """What the processes of a run of 3 replicas found; its checkpoint is in the folder then."""
    saving = functools.partial(work, folder=folder)
    run = attempt(saving, spec(cases.sharded(3)), backend, REPLICAS)
    assert run.failure is None, run.failure
    return run.returned


def gone_on(session: Session, folder: str) -> dict[str, Any]:
    """What a run ends with that goes on from that checkpoint."""
    session.restore(Path(folder))
    return ended(session)
