"""Every conformance check on every backend, with 3 replicas but one; in NumPy with 2 and 5 as well."""

from __future__ import annotations

import pytest

from isotrain.testing.pytest import backend_suite

SLOW = pytest.mark.slow
TWO_SLOW = [pytest.param(2, marks=SLOW)]
THREE_SLOW = [pytest.param(3, marks=SLOW)]
GOING_ON = ("goes_on",)
"""Asked of one backend of each framework; all others go on in `tests/integration/test_resume_backends.py`."""

pytestmark = pytest.mark.usefixtures("reference")

TestReference = backend_suite("reference", replicas=[2, 3, pytest.param(5, marks=SLOW)])
TestTorchDDP = backend_suite("torch-ddp", replicas=[3])
TestTensorFlowMirrored = backend_suite("tf-mirrored", replicas=THREE_SLOW, without=GOING_ON)
TestTensorFlowMultiWorker = backend_suite("tf-multiworker", replicas=THREE_SLOW)
TestHorovodTorch = backend_suite("horovod-torch", replicas=THREE_SLOW, without=GOING_ON)
TestHorovodTensorFlow = backend_suite("horovod-tf", replicas=TWO_SLOW, without=GOING_ON)
"""With three, Horovod is seen above, and TensorFlow's tracing is as long."""
