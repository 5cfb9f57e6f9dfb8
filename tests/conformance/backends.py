"""The backends that have to pass, and how tests are parametrised over them."""

from __future__ import annotations

import pytest

BACKENDS = ("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
"""All of them, really: one that is missing fails its tests."""


def param(*values: object, features: bool = False) -> object:
    """A parameter set whose name joins the values; some are left to `make test-features`."""
    marks = [pytest.mark.features] if features else []
    return pytest.param(*values, marks=marks, id="-".join(map(str, values)))
