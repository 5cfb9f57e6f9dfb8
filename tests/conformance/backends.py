"""The backends that have to pass, and how tests are parametrised over them."""

from __future__ import annotations

import pytest

BACKENDS = ("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
"""All of them, really: one that is missing fails its tests."""


def param(*values: object, features: bool = False, exhaustive: bool = False) -> object:
    """A parameter set whose name joins the values; some are left to other tiers."""
    marks = [pytest.mark.features] * features + [pytest.mark.exhaustive] * exhaustive
    return pytest.param(*values, marks=marks, id="-".join(map(str, values)))
