"""Makes the helpers of the tests importable, here and in the processes that tests start."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from isotrain.analysis.compare.report import html as report
from isotrain.core.launching.forkserver.pool import FORK_SERVERS
from isotrain.core.plugins import selection

TESTS = str(Path(__file__).resolve().parent)

if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
from helpers.shared_fork_servers import share_fork_servers  # noqa: E402
from helpers.shared_results import FOLDER  # noqa: E402

os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])

FORK_SERVERS.capacity = (
    24  # every framework, portable and native, and small ones under other variables
)
_BESIDE: dict[str, tuple[str, ...]] = {}
if find_spec("horovod") is not None:  # a fork server of a framework serves all of its backends
    horovod = "isotrain.adapters.horovod"
    of_torch = ("isotrain.adapters.torch.comm.ddp", f"{horovod}.torch_comm")
    _BESIDE = {
        "isotrain.adapters.torch.replica.replica_group": (f"{horovod}.torch_adapter", *of_torch),
        "isotrain.adapters.tensorflow.replica.replica_group": (
            f"{horovod}.tf_adapter",
            f"{horovod}.tf_comm",
        ),
    }
share_fork_servers(
    besides=(
        "isotrain.testing.pytest_suite",
        "numpy.random",
        "helpers.infrequent_gc",
    ),  # as most runs of tests do
    beside=_BESIDE,
    # Frameworks are told their number of threads, and NumPy's is set below; TensorFlow makes its
    # allocator when it first computes.
    unread=(
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_CPU_ALLOCATOR_USE_BFC"),
    ),
)

# In milliseconds: as often as Horovod has it, its threads would take much of the cores that tests share.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")
# NumPy's other threads wait for work by turning, and so do torch's: they too would take of the cores that
# tests share.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# On a busy machine an example may take long, and what tests say must not depend on luck: every run tries the
# same examples. `--hypothesis-profile others` tries other ones.
settings.register_profile("others", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("others"), derandomize=True)
settings.load_profile("same")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Shells start jobs in the background so, and those hand it on to whatever tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

OWNS_SHARED = FOLDER not in os.environ
"""Whether this process is the one that started the tests, and not one of its test processes."""

if OWNS_SHARED:
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="isotrain-tests-")

LONG = (
    "conformance/test_checks.py",
    "integration/test_example_plugins.py",
    "integration/test_resume_backends.py",
    "integration/test_failures.py",
    "integration/test_run_file_failures.py",
    "integration/test_sharded.py",
    "integration/test_pipeline.py",
    "integration/test_pipeline_refusals.py",
    "integration/test_examples.py",
    "integration/test_exact_resume.py",
    "integration/test_new_plugin.py",
    "integration/test_rendezvous.py",
    "conformance/test_strategies.py",
    "integration/test_report_in_browser.py",
    "integration/test_parity.py",
    "conformance/test_native_equality.py",
    "integration/test_benchmarks.py",
    "integration/test_resume.py",
    "integration/test_killed_runs.py",
    "integration/test_checkpoint_saving.py",
    "integration/test_recompute.py",
    "integration/test_start_methods.py",
    "integration/test_fork_servers.py",
    "integration/test_compare.py",
    "integration/test_sample_weights.py",
    "integration/test_export.py",
    "integration/test_tensorflow_group.py",
    "integration/test_graph_capture.py",
    "integration/test_s3_checkpoints.py",
    "integration/test_parameter_server.py",
    "integration/test_without_keras.py",
    "conformance/test_kit_on_strategies.py",
    "integration/test_weighted_losses.py",
    "integration/test_doctor.py",
    "integration/test_loaders.py",
    "integration/test_coming_from.py",
    "integration/test_horovod_group.py",
    "launchers/test_doc_commands.py",
    "launchers/test_lost_ranks.py",
    "launchers/test_external_launch.py",
    "launchers/test_scheduler_runs.py",
    "launchers/test_lost_hosts.py",
    "launchers/test_requeue.py",
    "launchers/test_recorded_environments.py",
    "launchers/test_link_traffic.py",
)
"""The files that take longest, in that order: begun first, so that test processes end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the longest files."""

    def place(item: pytest.Item) -> int:
        name = "/".join(item.path.parts[-2:])
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes what test processes shared."""
    if OWNS_SHARED:
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def variables_as_before() -> Iterator[None]:
    """Takes back what imports and tests of a file have set: fork servers are shared where all is alike."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def no_keras_here() -> Iterator[None]:
    """Keras runs on one framework per process: a file that imports it here decides what others can ask."""
    was_there = "keras" in sys.modules
    yield
    assert was_there or "keras" not in sys.modules, (
        "imported here: let `isolated.run_isolated` do that"
    )


@pytest.fixture
def digits_at_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The digits of scikit-learn without all else of it, which takes each process a second to import.

    Gives the folder with what is imported instead.
    """
    with in_place_of_sklearn("helpers/digits_only", monkeypatch) as folder:
        yield folder


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Some of them."""
    with in_place_of_sklearn("helpers/few_digits", monkeypatch):
        yield


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has comparisons write reports without plots, which take seconds to draw."""
    monkeypatch.setattr(report, "plots_of", lambda comparison: [])


@contextlib.contextmanager
def in_place_of_sklearn(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has it imported from a folder here."""
    standins = Path(TESTS) / folder
    monkeypatch.syspath_prepend(standins)
    for name in modules_of("sklearn"):
        monkeypatch.delitem(sys.modules, name)
    yield standins
    for name in modules_of("sklearn"):
        del sys.modules[name]


def modules_of(package: str) -> list[str]:
    """Those of a package that are imported."""
    return [name for name in sys.modules if name.partition(".")[0] == package]


@pytest.fixture(scope="module")
def reference() -> Iterator[None]:
    """Lets this process and the runs that it starts know the backend `reference`, for one file of tests."""
    with selection.using(["isotrain.testing.reference"], []):
        yield
