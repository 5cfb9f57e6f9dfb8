"""The backends that have to pass, and how tests are parametrised over them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

BACKENDS = ("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
"""All of them, really: one that is missing fails its tests."""

REPLICAS = (2, 3)
EVERYDAY = {("torch-ddp", 2), ("tf-mirrored", 2)}
"""The pairs of backend and replicas in the everyday tier: one process per replica, and one for all."""


def param(*values: object, slow: bool) -> object:
    """A parameter set whose name joins the values; slow ones stay out of the everyday tier."""
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(*values, marks=marks, id="-".join(map(_name, values)))


def _name(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def every_backend(replicas: Iterable[int] = REPLICAS) -> list[object]:
    """Parameter sets (backend, replicas)."""
    return [
        param(backend, count, slow=(backend, count) not in EVERYDAY)
        for count in replicas
        for backend in BACKENDS
    ]
