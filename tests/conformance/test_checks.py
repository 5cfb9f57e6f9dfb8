"""Every conformance check on every backend, with 2 or 3 replicas; in NumPy with 2 and 5."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest

from isotrain.testing.backend import CRASH_CHECKS, crash_outcome
from isotrain.testing.pytest_suite import backend_suite
from isotrain.testing.scorecard import Outcome

SLOW = pytest.mark.slow
FAILURES = (SLOW, pytest.mark.failures)
TWO_SLOW = [pytest.param(2, marks=SLOW)]
THREE_SLOW = [pytest.param(3, marks=SLOW)]
ENDS = {check.name: check for check in CRASH_CHECKS}
ONCE = ("resumes_exactly", *ENDS)
"""`resumes_exactly` is asked of one backend of each framework; all others go on in
`tests/integration/test_resume_backends.py`. How runs end that go wrong is asked below."""

pytestmark = pytest.mark.usefixtures("reference")

TestReference = backend_suite(
    "reference", replicas=[2, pytest.param(5, marks=SLOW)], without=["hang"]
)
TestTorchDDP = backend_suite("torch-ddp", replicas=[3], without=ENDS)
TestTensorFlowMirrored = backend_suite("tf-mirrored", replicas=THREE_SLOW, without=ENDS)
TestTensorFlowMultiWorker = backend_suite("tf-multiworker", replicas=THREE_SLOW, without=ONCE)
TestHorovodTorch = backend_suite("horovod-torch", replicas=THREE_SLOW, without=ONCE)
TestHorovodTensorFlow = backend_suite("horovod-tf", replicas=TWO_SLOW, without=ONCE)
"""With three, which tells a direction from its opposite, Horovod and TensorFlow's tracing are seen above."""

EVERYDAY = (("reference", "hang"), ("torch-ddp", "crash"), ("torch-ddp", "hang"))
OTHERS = tuple(
    (backend, check)
    for backend in ("tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
    for check in ENDS
)
AT_ONCE = 4
OF_THREE = [(backend, "crash") for backend in ("torch-ddp", "tf-multiworker", "horovod-torch")]
"""In which one that survives sees another leave, that has seen it; the rest have two replicas."""


@functools.cache
def outcomes(cases: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], Outcome]:
    """Outcomes of failing runs, several at once: most of the time they wait to be found hanging."""

    def outcome(case: tuple[str, str]) -> Outcome:
        backend, check = case
        return crash_outcome(ENDS[check], backend, replicas=3 if case in OF_THREE else 2)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(cases, pool.map(outcome, cases), strict=True))


@pytest.mark.parametrize(
    ("backend", "check"), [*EVERYDAY, *(pytest.param(*case, marks=FAILURES) for case in OTHERS)]
)
def test_a_crash_or_hang_is_reported(backend: str, check: str) -> None:
    case = backend, check
    found = outcomes(EVERYDAY if case in EVERYDAY else OTHERS)[case]
    assert found.verdict == "passed", found.reason
