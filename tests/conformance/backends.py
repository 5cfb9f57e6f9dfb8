"""The backends that have to pass, and how tests are parametrised over them."""

from __future__ import annotations

import pytest

BACKENDS = ("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
"""All of them, really: one that is missing fails its tests."""


def param(*values: object, slow: bool = False) -> object:
    """A parameter set whose name joins the values; slow ones stay out of the everyday tier."""
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(*values, marks=marks, id="-".join(map(str, values)))
