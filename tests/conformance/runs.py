"""Trains the cases under isotrain, each at most once per test session."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from conformance import cases

import isotrain
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


def trained(backend: str, replicas: int, case: str) -> dict[str, Any]:
    """What process 0 has after training: `start` and `weights` by name, `loss` of every step."""
    found = _attempted(backend, replicas, case)
    if isinstance(found, Exception):
        raise found
    return found


@functools.cache
def _attempted(backend: str, replicas: int, case: str) -> dict[str, Any] | Exception:
    """As `trained`; a run that fails does so once, and not again for every test that wants it."""
    try:
        return _train_under(backend, replicas, case)
    except Exception as error:
        return error


def _train_under(backend: str, replicas: int, case: str) -> dict[str, Any]:
    spec = {**SPECS[case], "backend_options": ONE_GROUP if replicas > 2 else {}}
    returned = launch_quietly(train, spec, backend, replicas)
    for rank, other in enumerate(returned):
        for name, value in returned[0]["weights"].items():
            assert np.array_equal(value, other["weights"][name]), f"rank {rank} differs in {name}"
    return returned[0]


def launch_quietly(
    work: Callable[[Session], Any], spec: dict[str, Any], backend: str, replicas: int
) -> list[Any]:
    """Launches and shows nothing; the run's files are kept only when it fails."""
    folder = tempfile.mkdtemp(prefix="isotrain-conformance-")
    returned = isotrain.launch(
        work,
        spec,
        backend=backend,
        replicas=replicas,
        run_directory=folder,
        on_event=lambda event: None,
    )
    shutil.rmtree(folder)
    return returned
