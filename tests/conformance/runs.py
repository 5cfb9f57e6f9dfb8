"""Trains the cases under isotrain, each at most once per test session."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import numpy as np

import isotrain
from conformance import cases
from isotrain.core.loop import fit
from isotrain.core.session import Session

SPECS: dict[str, dict[str, Any]] = {
    **{f"{name}-float64": cases.spec(name, "float64") for name in ("sgd", "adam")},
    "adamw-float64": cases.spec("adamw", "float64", **cases.CLIPPED),
    **{f"{name}-float32": cases.spec(name, "float32") for name in ("sgd", "adam")},
    **{f"{name}-torch": cases.native_torch_spec(name) for name in ("sgd", "adam")},
}
"""What can be trained, by name."""

ONE_GROUP = {name: {"groups": 1} for name in ("horovod-torch", "horovod-tf")}
"""Horovod's sums over three and more replicas repeat to the bit only when they travel as a whole."""


def train(session: Session) -> dict[str, Any]:
    """The work of a launch: the built-in loop, with the weights at both ends."""
    start = session.read_state(("trainable", "non-trainable"))
    fit(session)
    losses = list(session.flush_losses())
    return {
        "start": start,
        "loss": losses,
        "weights": session.read_state(("trainable", "non-trainable")),
    }


@functools.cache
def trained(backend: str, replicas: int, case: str) -> dict[str, Any]:
    """What process 0 has after training: `start` and `weights` by name, `loss` of every step."""
    spec = {**SPECS[case], "backend_options": ONE_GROUP if replicas > 2 else {}}
    folder = tempfile.mkdtemp(prefix="isotrain-conformance-")
    returned = isotrain.launch(
        train, spec, backend=backend, replicas=replicas, run_directory=folder, on_event=_quiet
    )
    for rank, other in enumerate(returned):
        for name, value in returned[0]["weights"].items():
            assert np.array_equal(value, other["weights"][name]), f"rank {rank} differs in {name}"
    return returned[0]


def _quiet(event: Any) -> None:
    """Shows nothing of a run."""
