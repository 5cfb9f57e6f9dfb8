"""Every conformance check on every backend, with 3 replicas, or with 2 and 3."""

from __future__ import annotations

import pytest

from isotrain.testing.pytest import backend_suite

SLOW = pytest.mark.slow
THREE_SLOW = [pytest.param(3, marks=SLOW)]
TWO_QUICK = [2, *THREE_SLOW]

pytestmark = pytest.mark.usefixtures("reference")

TestReference = backend_suite("reference", replicas=[2, 3, pytest.param(5, marks=SLOW)])
TestTorchDDP = backend_suite("torch-ddp", replicas=TWO_QUICK)
TestTensorFlowMirrored = backend_suite("tf-mirrored", replicas=THREE_SLOW)
TestTensorFlowMultiWorker = backend_suite("tf-multiworker", replicas=THREE_SLOW)
TestHorovodTorch = backend_suite("horovod-torch", replicas=THREE_SLOW)
TestHorovodTensorFlow = backend_suite("horovod-tf", replicas=THREE_SLOW, with_endings=False)
"""How its runs end that go wrong is seen in `tests/integration/test_failures.py`."""
