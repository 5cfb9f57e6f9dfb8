"""Makes the helpers of the tests importable, here and in the processes that tests start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from isotrain.core.plugins import choice

TESTS = str(Path(__file__).resolve().parent)

if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])

# Elsewhere every run tries other examples; what continuous integration says must not depend on luck.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="module")
def reference() -> Iterator[None]:
    """Lets this process and the runs that it starts know the backend `reference`, for one file of tests."""
    with choice.chosen(["isotrain.testing.reference"], []):
        yield
