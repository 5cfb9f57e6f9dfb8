"""Runs of the strategy checks: functions that every rank runs, with the results that it returns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.device_mesh import DATA
from isotrain.core.contracts.state import MODEL_STATE
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.session import Session
from isotrain.testing import digits
from isotrain.testing.recording_group import recording_capabilities

EARLY = 3
"""Number of first steps after each of which the replicas are compared."""
SPREAD_RATE = 0.5
TINY_RATE = 2.0**-40
"""Learning rate so small that weights change only by communication."""
SMALL_RATE = 2.0**-24
"""Learning rate so small that gradients stay constant, but large enough to change the weights measurably."""
HALF, WHOLE = 30, 60
"""Steps after which the sum of the gradients is measured."""

Results = dict[str, Any]


def whole_training(session: Session) -> Results:
    """Trains on all images."""
    start, used = _weights(session), set[Capability]()
    losses, early, fingerprints = [], [], []
    for batch in session.batches():
        with recording_capabilities(session.strategy, used):
            losses.append(float(session.step(batch)))
        if batch.step < EARLY:
            early.append(_weights(session))
            fingerprints.append(_fingerprints(session))
    return {
        "start": start,
        "losses": losses,
        "early": early,
        "fingerprints": [*fingerprints, _fingerprints(session)],
        "used": sorted(used),
        "weights": _weights(session),
        "accuracy": session.evaluate()["accuracy"],
    }


def one_image(session: Session) -> Results:
    """Trains on a single image: all replicas but one have no samples."""
    start = _weights(session)
    batches = session.batches()
    losses = [float(session.step(next(batches)))]
    held = {kind: session.group.describe_state((kind,)) for kind in MODEL_STATE}
    shards = _shard_names(session)
    losses += [float(session.step(batch)) for batch in batches]  # the last one gathers weights
    planned = session.plan.state_bytes
    return {
        "start": start,
        "losses": losses,
        "weights": _weights(session),
        "held": {kind: sum(i.nbytes for i in infos.values()) for kind, infos in held.items()},
        "parts": shards,
        "planned": None if planned is None else asdict(planned),
    }


def exchange_alone(session: Session) -> Results:
    """Makes the weights of the replicas differ, then takes steps that change them only by communication."""
    start, group = _weights(session), session.group
    first = next(session.batches())
    group.local_step(first, SPREAD_RATE)
    group.average_parameters()
    before = _weights(session)
    session.write_state(start)
    group.local_step(first, SPREAD_RATE)
    for batch in session.batches():
        session.step(batch)
    group.average_parameters()
    return {"before": before, "after": _weights(session)}


def steady_gradient(session: Session) -> Results:
    """Takes steps on one global batch, so small that its gradient stays constant."""
    results: Results = {"start": _weights(session)}
    for batch in session.batches():
        session.step(batch)
        if batch.step + 1 in (HALF, WHOLE):
            results[f"after {batch.step + 1}"] = _weights(session)
        if batch.step + 1 == WHOLE:
            break
    return results


def ordered_steps(session: Session) -> Results:
    """Takes first steps with sums in one order; applies the gradients of each by the group alone, too."""
    steps = []
    for batch in session.batches():
        before = _weights(session)
        gradients, loss = session.gradients(batch)
        session.apply_gradients(batch, gradients, loss)
        after = _weights(session)
        session.write_state(before)
        session.group.apply_gradients(gradients, digits.RATE)
        steps.append({"before": before, "after": after, "by the group": _weights(session)})
        session.write_state(after)
        if len(steps) == EARLY:
            break
    return {"steps": steps}


def _weights(session: Session) -> dict[str, np.ndarray]:
    """Trainable weights by name, in unsharded shapes, gathered where they are sharded. Collective."""
    described = session.group.describe_state(("trainable",)).values()
    is_sharded = any(info.offset is not None for info in described)
    gathered = session.strategy.evaluating(session.group) if is_sharded else nullcontext()
    with gathered:
        return session.read_state(("trainable",))


def _shard_names(session: Session) -> list[str]:
    """Names of the shards of this process, with their offset and the index of their copy."""
    described = session.group.describe_state(MODEL_STATE).items()
    held = [f"{name} from {info.offset}" for name, info in described if info.offset is not None]
    copy = session.plan.device_mesh.index_in_group(session.rank, DATA) if held else 0
    return [f"{name}, copy {copy}" for name in held]


def _fingerprints(session: Session) -> list[str]:
    """Fingerprint of each local replica, equal where the weights are equal. Collective.

    Several replicas of one process are compared by the gradients that they compute for the same images.
    Without the capability `gradients`, and in a parameter-server run, whose coordinator has one state for
    all of them, the state of this process stands for all.
    """
    local = session.group.local_replicas
    supported = (
        plugin_manager()
        .backend(session.plan.backend)
        .capabilities_for(session.plan.parallel_layout)
        .has
    )
    if (
        len(local) == 1
        or session.plan.uses_parameter_server
        or Capability.GRADIENTS not in supported
    ):
        return [_digest(list(_weights(session).values()))] * len(local)
    gradients, _ = session.group.gradients(_same_for_all(session))
    return [_digest([session.group.numpy(g) for g in of_replica]) for of_replica in gradients]


def _digest(arrays: Sequence[np.ndarray]) -> str:
    """SHA-256 of the bytes of some arrays, any shapes and dtypes."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def _same_for_all(session: Session, count: int = 4) -> Batch:
    """Batch in which every local replica has the same `count` images."""
    group = session.group
    inputs, labels = (part[:count] for part in digits.data().train)
    micro_batch = Slice(group.to_device(inputs), group.to_device(labels), count, 1.0)
    slices = tuple((micro_batch,) for _ in group.local_replicas)
    return Batch(0, 0, 0, count * group.replicas, False, True, slices)
