"""Trains the cases under isotrain, each at most once per test session."""

from __future__ import annotations

import functools
from typing import Any

from conformance import cases

from isotrain.core.errors import IsotrainError
from isotrain.testing import native

SPECS: dict[str, dict[str, Any]] = {
    **{f"{name}-float64": cases.spec(name, "float64") for name in ("sgd", "adam")},
    "adamw-float64": cases.spec("adamw", "float64", **cases.CLIPPED),
    **{f"{name}-float32": cases.spec(name, "float32") for name in ("sgd", "adam")},
    **{f"{name}-torch": cases.native_torch_spec(name) for name in ("sgd", "adam")},
}
"""What can be trained, by name."""

ONE_GROUP = {name: {"groups": 1} for name in ("horovod-torch", "horovod-tf")}
"""Horovod's sums over three and more replicas repeat to the bit only when they travel as a whole."""


def trained(backend: str, replicas: int, case: str) -> dict[str, Any]:
    """What process 0 has after training: `start` and `weights` by name, `loss` of every step."""
    found = _attempted(backend, replicas, case)
    if isinstance(found, Exception):
        raise found
    return found


@functools.cache
def _attempted(backend: str, replicas: int, case: str) -> dict[str, Any] | Exception:
    """As `trained`; a run that fails does so once, and not again for every test that wants it."""
    spec = {**SPECS[case], "backend_options": ONE_GROUP if replicas > 2 else {}}
    try:
        return native.trained(spec, backend, replicas)
    except (AssertionError, IsotrainError) as error:
        return error
