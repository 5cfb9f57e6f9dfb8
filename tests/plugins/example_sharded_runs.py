"""Sharded runs on a backend: saved as shards, and resumed in other layouts."""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from integration import sharded_cases as cases

import isotrain
from isotrain.core.session.session import Session
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session
from isotrain.testing.launching import try_run

REPLICAS = 3
WIDTH = 255
SHARES = "-shares"
"""Suffix of the checkpoint folder where weights are not sharded."""
IN_SHARES = cases.sharded(2, bucket_megabytes=0.009)
"""With a bucket for the largest weight, and one for the others."""
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
    "global_batch_size": GLOBAL_BATCH,
    "epochs": 2,
    "precision": "float64",
    "threads": 1,
    "timeouts": LONG_TIMEOUTS,
    **cases.OPTIMIZERS[cases.LAST],
    "gradient_accumulation_steps": 1,
}


def spec(strategy: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The spec of a run."""
    return cases.spec(strategy, SPEC, **changes)


def work(session: Session, folder: str) -> dict[str, Any]:
    """Trains in stage 3, and saves in the middle; goes on from there in stage 2, and saves that at once."""
    cases.stopped(session)
    found = {"bytes": {"here": live_bytes(), **described_bytes(session)}}
    described = session.group.describe_state().items()
    found["parts"] = {name: [info.offset, info.shard_shape] for name, info in described}
    session.save(folder)
    session.evaluate()  # brings all weights together, which go again in the next step
    found["ended"] = ended(session)
    with next_session(session, "shares", spec(IN_SHARES, gradient_accumulation_steps=2)) as session:
        session.restore(Path(folder))
        session.save(folder + SHARES)
        described = session.group.describe_state(("optimizer",)).items()
        found["slots"] = {n: info.nbytes for n, info in described if info.shard_shape == info.shape}
        found["shares"] = ended(session)
    return found


def ended(session: Session) -> dict[str, Any]:
    """What is left of it ends with."""
    found = cases.trained(session)
    return {kind: found[kind] for kind in ("losses", "evaluation", "weights")}


def live_bytes() -> int:
    """Bytes of all arrays on this process's device."""
    import jax

    gc.collect()  # of what no longer counts, cycles may still have some
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


def described_bytes(session: Session) -> dict[str, int]:
    """Bytes of model and slots: on this replica, and in all."""
    described = session.group.describe_state().values()
    return {
        "told": sum(info.nbytes for info in described),
        "all": sum(info.full_nbytes for info in described),
    }


def gone_on_by_four(backend: str, folder: str) -> list[dict[str, Any]]:
    """What a run of two hosts with two replicas each ends with, which goes on from the checkpoint."""
    hybrid = spec(cases.KINDS["hybrid 3"], gradient_accumulation_steps=2)
    run = try_run(functools.partial(gone_on, folder=folder), hybrid, backend, 2 * cases.HOST)
    assert run.failure is None, run.failure
    return run.returned


def found(backend: str, folder: str) -> list[dict[str, Any]]:
    """What the processes of a run of 3 replicas found; its checkpoint is in the folder then."""
    saving = functools.partial(work, folder=folder)
    run = try_run(saving, spec(cases.sharded(3)), backend, REPLICAS)
    assert run.failure is None, run.failure
    return run.returned


def gone_on(session: Session, folder: str) -> dict[str, Any]:
    """What a run ends with that goes on from that checkpoint."""
    session.restore(Path(folder))
    return ended(session)
