"""Makes the helpers of the tests importable, here and in the processes that tests start."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import zlib
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

FORK_SERVERS.capacity = 24  # each framework, portable and native, and small ones by variables
_PRELOADED_WITH: dict[str, tuple[str, ...]] = {}
if find_spec("horovod") is not None:  # a fork server of a framework serves all of its backends
    adapters = "isotrain.adapters"
    _PRELOADED_WITH = {
        f"{adapters}.torch.replica.replica_group": (
            *(f"{adapters}.torch.adapter", f"{adapters}.torch.comm.ddp"),
            *(f"{adapters}.horovod.torch_adapter", f"{adapters}.horovod.torch_comm"),
        ),
        f"{adapters}.tensorflow.replica.replica_group": (
            *(f"{adapters}.tensorflow.adapter", f"{adapters}.tensorflow.comm.tf_distribute"),
            *(f"{adapters}.horovod.tf_adapter", f"{adapters}.horovod.tf_comm"),
        ),
    }
share_fork_servers(
    preloaded=("isotrain.testing.pytest_suite", "numpy.random", "helpers.infrequent_gc"),
    preloaded_with=_PRELOADED_WITH,
    # isotrain sets the number of threads of frameworks, and that of NumPy is set below. TensorFlow creates
    # its allocator when it first computes.
    unread_variables=(
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_CPU_ALLOCATOR_USE_BFC"),
    ),
)

# In milliseconds. With Horovod's default its threads would use much of the cores that tests share.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")
# Idle threads of NumPy and torch spin, which uses the cores that tests share.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# An example may take long on a busy machine, and outcomes must be reproducible: every run has the same
# examples. `--hypothesis-profile others` tries other ones.
settings.register_profile("others", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("others"), derandomize=True)
settings.load_profile("same")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Shells start background jobs so, and programs that tests start and interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

IMPORTED_BEFORE = frozenset(sys.modules)
"""What was imported before the tests were collected."""
COLLECTION_IMPORTS: set[str] = set()
"""See `collection_imports`."""

OWNS_SHARED = FOLDER not in os.environ
"""Whether this process started the tests, and is no worker of pytest-xdist."""

if OWNS_SHARED:
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="isotrain-tests-")

LONG = (
    "conformance/test_checks.py",
    "integration/test_random_layers.py",
    "integration/test_reproducible.py",
    "integration/test_sharded.py",
    "integration/test_example_plugins.py",
    "integration/test_examples.py",
    "integration/test_resume_backends.py",
    "integration/test_orders.py",
    "integration/test_session_freeze.py",
    "conformance/test_native_equality.py",
    "unit/data/test_host_reader.py",
    "integration/test_tensor_parallel.py",
    "integration/test_native_tensor_parallel.py",
    "integration/test_named_updates.py",
    "integration/test_custom_batches.py",
    "integration/test_new_plugin.py",
    "integration/test_benchmarks.py",
    "integration/test_collate.py",
    "integration/test_exact_resume.py",
    "integration/test_pipeline.py",
    "integration/test_loader_workers.py",
    "integration/test_rendezvous.py",
    "integration/test_per_replica_state.py",
    "integration/test_tensorflow_group.py",
    "conformance/test_strategies.py",
    "integration/test_weight_average.py",
    "integration/test_custom_optimizers.py",
    "integration/test_action_timing.py",
    "plugins/test_installed.py",
    "integration/test_parity_of_gpu_arithmetic.py",
    "integration/test_failures.py",
    "integration/test_sample_weights.py",
    "integration/test_non_mean_losses.py",
    "integration/test_evaluate.py",
    "integration/test_export.py",
    "integration/test_compare.py",
    "integration/test_parity.py",
    "integration/test_report_in_browser.py",
    "integration/test_slow_readers.py",
    "conformance/test_kit_on_strategies.py",
    "integration/test_graph_capture.py",
    "integration/test_parameter_server.py",
    "integration/test_optimizer_groups.py",
    "integration/test_doctor.py",
    "unit/data/test_workers.py",
    "integration/test_shared_streams.py",
    "integration/test_loaders.py",
    "integration/test_weighted_losses.py",
    "integration/test_global_batch_norm.py",
    "integration/test_check.py",
    "integration/test_third_party_streams.py",
    "integration/test_torch_group.py",
    "integration/test_s3_checkpoints.py",
    "integration/test_killed_runs.py",
    "conformance/test_broken_backends.py",
    "integration/test_recompute.py",
    "integration/test_horovod_group.py",
    "unit/analysis/test_comparison_report.py",
    "integration/test_scheduler_runs.py",
    "integration/test_initial_weights.py",
    "conformance/test_spec_variety.py",
    "integration/test_submodule_modes.py",
    "integration/test_session.py",
    "integration/test_resume.py",
    "integration/test_start_methods.py",
    "integration/test_session_log.py",
    "integration/test_layer_state.py",
    "integration/test_gpu_report.py",
    "integration/test_worker_failures.py",
    "unit/repository/test_architecture.py",
    "integration/test_without_keras.py",
    "integration/test_launching.py",
    "integration/test_resume_by_map.py",
    "integration/test_predict.py",
    "plugins/test_loggers.py",
    "conformance/test_parity.py",
    "integration/test_frozen_models.py",
    "integration/test_differentiating_models.py",
    "unit/cli/test_init.py",
    "unit/cli/test_run_command.py",
    "integration/test_reference_backend.py",
    "launchers/test_doc_commands.py",
    "launchers/test_lost_ranks.py",
    "launchers/test_external_launch.py",
    "launchers/test_scheduler_runs.py",
    "launchers/test_lost_hosts.py",
    "launchers/test_requeue.py",
    "launchers/test_recorded_environments.py",
    "launchers/test_link_traffic.py",
)
"""The files that take longest, in that order: they run first, so that test processes end together."""


BACKENDS = {
    "features": ("torch-ddp|tf-mirrored|tf-multiworker|horovod-torch|horovod-tf",),
    "examples": ("torch-ddp|horovod-torch", "tf-mirrored|tf-multiworker|horovod-tf"),
}
"""Backends of which a test with this mark runs on one, by its name: examples on one of each framework."""


def leave_out_other_backends(items: list[pytest.Item]) -> None:
    """Marks the cells of a test on all other backends as `exhaustive`."""
    cells: dict[tuple[str, str], list[tuple[pytest.Item, str]]] = {}
    for item in items:
        name, _, values = item.nodeid.partition("[")
        for mark in filter(item.get_closest_marker, BACKENDS):
            for among in BACKENDS[mark]:
                if backend := re.search(among, values):
                    cells.setdefault((name, among), []).append((item, backend.group()))
    for (name, _), found in cells.items():
        backends = sorted({backend for _, backend in found})
        kept = backends[zlib.crc32(name.encode()) % len(backends)]
        for item, backend in found:
            if backend != kept:
                item.add_marker(pytest.mark.exhaustive)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the longest files first, and refuses names of tests that differ between processes.

    The representation of a function has an address in memory: the test processes would collect
    different tests, and none of them would run.
    """
    changing = sorted({item.nodeid for item in items if " at 0x" in item.nodeid})
    if changing:
        raise pytest.UsageError(
            f"tests whose names hold an address in memory, {changing}: name them by id="
        )

    def position(item: pytest.Item) -> int:
        name = item.path.relative_to(TESTS).as_posix()
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=position)
    leave_out_other_backends(items)


def pytest_collection_finish() -> None:
    """Notes which slow imports the test files make when they are collected, as each test process does."""
    COLLECTION_IMPORTS.update({"keras", "tensorflow"} & set(sys.modules) - IMPORTED_BEFORE)


@pytest.fixture(scope="session")
def collection_imports() -> set[str]:
    """Packages that take seconds to import, and that collecting the tests has imported."""
    return COLLECTION_IMPORTS


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the folder of shared results."""
    if OWNS_SHARED:
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def variables_as_before() -> Iterator[None]:
    """Restores environment variables after each file: runs share a fork server only with equal variables."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def no_keras_imported() -> Iterator[None]:
    """Checks that no test file imports Keras here, which would fix the framework for all other files."""
    was_imported = "keras" in sys.modules
    yield
    assert was_imported or "keras" not in sys.modules, (
        "a test imported keras: use `isolated.run_isolated`"
    )


@pytest.fixture
def digits_at_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The digits of scikit-learn without the rest of it, which takes each process a second to import.

    Returns the folder of the package that is imported instead.
    """
    with in_place_of_sklearn("helpers/digits_only", monkeypatch) as folder:
        yield folder


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first digits of scikit-learn, for which frameworks trace once."""
    with in_place_of_sklearn("helpers/few_digits", monkeypatch):
        yield


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes comparisons write reports without plots, which take seconds to draw."""
    monkeypatch.setattr(report, "plots_of", lambda comparison: [])


@contextlib.contextmanager
def in_place_of_sklearn(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes `sklearn` be imported from a folder of the tests."""
    packages = Path(TESTS) / folder
    monkeypatch.syspath_prepend(packages)
    for name in modules_of("sklearn"):
        monkeypatch.delitem(sys.modules, name)
    yield packages
    for name in modules_of("sklearn"):
        del sys.modules[name]


def modules_of(package: str) -> list[str]:
    """Names of a package's imported modules."""
    return [name for name in sys.modules if name.partition(".")[0] == package]


@pytest.fixture(scope="module")
def reference() -> Iterator[None]:
    """Registers the backend `reference` in this process and in its runs, for one test file."""
    with selection.using(["isotrain.testing.reference"], []):
        yield
