"""The runs in which a strategy is tried, and what each process brings back from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np

from isotrain.core.contracts.capabilities import Capability
from isotrain.core.contracts.device_mesh import DATA
from isotrain.core.contracts.state import MODEL_STATE
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.session import Session
from isotrain.testing import digits
from isotrain.testing.recording_group import recording_capabilities

EARLY = 3
"""Steps after each of which the replicas are looked at."""
SPREAD_RATE = 0.5
TINY_RATE = 2.0**-40
"""With which weights stay where they are, but for what is exchanged."""
SMALL_RATE = 2.0**-24
"""With which gradients do not change, and can still be told from the weights."""
HALF, WHOLE = 30, 60
"""Steps after which the sum of the gradients is looked at."""

Found = dict[str, Any]


def whole_training(session: Session) -> Found:
    """Trains on all images."""
    start, used = _weights(session), set[Capability]()
    losses, early, fingerprints = [], [], []
    for batch in session.batches():
        with recording_capabilities(session, used):
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


def one_image(session: Session) -> Found:
    """Trains on a single image: all replicas but one have nothing."""
    start = _weights(session)
    losses = [float(session.step(batch)) for batch in session.batches()]
    held = {kind: session.group.describe_state((kind,)) for kind in MODEL_STATE}
    parts = _parts(session)
    planned = session.plan.state_bytes
    return {
        "start": start,
        "losses": losses,
        "weights": _weights(session),
        "held": {kind: sum(i.nbytes for i in infos.values()) for kind, infos in held.items()},
        "parts": parts,
        "planned": None if planned is None else asdict(planned),
    }


def exchange_alone(session: Session) -> Found:
    """Drives the replicas apart and takes steps that change nothing but by what is exchanged."""
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


def steady_gradient(session: Session) -> Found:
    """Takes steps on one global batch, so small that its gradient stays what it is."""
    found: Found = {"start": _weights(session)}
    for batch in session.batches():
        session.step(batch)
        if batch.step + 1 in (HALF, WHOLE):
            found[f"after {batch.step + 1}"] = _weights(session)
        if batch.step + 1 == WHOLE:
            break
    return found


def _weights(session: Session) -> dict[str, np.ndarray]:
    """All of them, brought together where they lie in parts. Called by every process."""
    described = session.group.describe_state(("trainable",)).values()
    in_parts = any(info.offset is not None for info in described)
    together = session.strategy.evaluating(session.group) if in_parts else nullcontext()
    with together:
        return session.read_state(("trainable",))


def _parts(session: Session) -> list[str]:
    """What this process alone has of the state, of those that are to have other parts."""
    described = session.group.describe_state(MODEL_STATE).items()
    held = [f"{name} from {info.offset}" for name, info in described if info.offset is not None]
    copy = session.plan.device_mesh.coordinates(session.rank).get(DATA, 0) if held else 0
    return [f"{name}, copy {copy}" for name in held]


def _fingerprints(session: Session) -> list[str]:
    """Of each local replica: equal where the weights are.

    Where a process holds several replicas, they are told apart by the gradients that they compute for
    the same images; without that capability, and in a parameter-server run, whose coordinator holds one
    state for all of them, this process's state stands for all.
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
    return [_digest([session.group.numpy(part) for part in own]) for own in gradients]


def _digest(arrays: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def _same_for_all(session: Session, count: int = 4) -> Batch:
    """A batch in which every local replica has the very same images."""
    group = session.group
    inputs, labels = (part[:count] for part in digits.data().train)
    placed = Slice(group.to_device(inputs), group.to_device(labels), count, 1.0)
    slices = tuple((placed,) for _ in group.local_replicas)
    return Batch(0, 0, 0, count * group.replicas, False, True, slices)
