"""The plan says how processes start, and why not by forking where that cannot be."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from isotrain.adapters.horovod import build_info
from isotrain.adapters.horovod.tf_adapter import HorovodTF
from isotrain.adapters.horovod.torch_adapter import HorovodTorch
from isotrain.adapters.keras import backend as keras_backend
from isotrain.adapters.tensorflow.adapter import TFMirrored, TFMultiWorker
from isotrain.adapters.torch.adapter import TorchDDP
from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.contracts.plan import StartMethod
from isotrain.core.errors import PlanError
from isotrain.core.launching.forkserver import pool
from isotrain.core.planning.planner import resolve_start_method
from isotrain.core.spec.loading import load_spec
from isotrain.core.system import process
from isotrain.core.system.process import signal_name
from isotrain.testing.reference.adapter import Reference

SPEC = load_spec(
    {
        "model": dict,
        "data": dict,
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.5},
        "global_batch_size": 1,
        "steps": 1,
    }
)
AHEAD = "isotrain.adapters.torch.fast_import"
ADAPTERS = (TorchDDP, TFMirrored, TFMultiWorker, HorovodTorch, HorovodTF)


class SaysNothing(TorchDDP):
    name = "says-nothing"
    preload = Adapter.preload


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISOTRAIN_START", raising=False)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_backends_are_forked_on_cpus_and_not_on_gpus(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_info, "has_collective", lambda extension, name: name != "mpi")
    start = resolve_start_method(adapter(), LOCAL, SPEC, "cpu")
    assert (start.way, start.why_fresh) == ("forked", None)
    order = [name for name in start.imports if name != AHEAD]
    assert order[:3] == [keras_backend.LAZY_IMPORT, adapter.framework, "keras"]
    assert "GPU" in str(resolve_start_method(adapter(), LOCAL, SPEC, "gpu").why_fresh)


@pytest.mark.parametrize("adapter", [*ADAPTERS, Reference])
def test_modules_that_a_fork_server_imports_exist(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong name would only make every process start with a fresh interpreter, with a note."""
    monkeypatch.setattr(build_info, "has_collective", lambda extension, name: name != "mpi")
    imports = resolve_start_method(adapter(), LOCAL, SPEC, "cpu").imports
    modules = [name for name in imports if name.startswith("isotrain.")]
    assert modules
    assert all(importlib.util.find_spec(name) is not None for name in modules)


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
@pytest.mark.parametrize(
    "adapters", [(TorchDDP, HorovodTorch), (TFMirrored, TFMultiWorker, HorovodTF)]
)
def test_backends_of_a_framework_share_a_fork_server_in_these_tests(
    adapters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each more would cost every test process the seconds that the framework takes to import."""
    monkeypatch.setattr(build_info, "has_collective", lambda extension, name: name != "mpi")
    monkeypatch.setattr(pool, "ForkServer", lambda *arguments: mock.Mock())
    servers = {
        pool.FORK_SERVERS.get(resolve_start_method(adapter(), LOCAL, SPEC, "cpu").imports, {})
        for adapter in adapters
    }
    assert len(servers) == 1
    pool.FORK_SERVERS.drop(servers.pop())


@pytest.mark.parametrize("adapter", [TorchDDP, HorovodTorch])
def test_a_native_torch_model_needs_no_keras(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_info, "has_collective", lambda extension, name: name != "mpi")
    native = SPEC.replace(model={"torch": dict})
    imports = resolve_start_method(adapter(), LOCAL, native, "cpu").imports
    assert imports[:2] == (AHEAD, "torch")
    assert not any("keras" in name for name in imports)


def test_torchs_library_is_preloaded_without_a_thread() -> None:
    program = (
        f"import sys, threading, {AHEAD}; said = open('/proc/self/maps').read();"
        " print('libtorch_cpu.so' in said, 'torch' in sys.modules, threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["True", "False", "1"]


@pytest.mark.parametrize("adapter", [HorovodTorch, HorovodTF])
def test_mpi_is_not_forked(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = build_info.Build("0.28.1", None, None)
    object.__setattr__(found, "extension", "some.so")
    monkeypatch.setattr(build_info, "installed", lambda framework: found)
    monkeypatch.setattr(build_info, "has_collective", lambda extension, name: name == "mpi")
    assert "MPI" in str(adapter().preload(SPEC, device="cpu").why_fresh)


def test_backends_and_launchers_without_a_start_method_are_not_forked() -> None:
    silent = resolve_start_method(SaysNothing(), LOCAL, SPEC, "cpu")
    assert silent == StartMethod(
        why_fresh="backend 'says-nothing' does not declare that it can be forked"
    )
    alone = resolve_start_method(TorchDDP(), "one-by-one", SPEC, "cpu")
    assert alone.why_fresh == "one-by-one starts each process itself"


def test_a_system_without_fork_starts_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert "darwin" in str(process.fork_obstacle())
    assert resolve_start_method(TorchDDP(), LOCAL, SPEC, "cpu").way == "fresh"


def test_forking_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOTRAIN_START", "fresh")
    start = resolve_start_method(TorchDDP(), LOCAL, SPEC, "cpu")
    assert (start.way, start.why_fresh) == ("fresh", "ISOTRAIN_START=fresh")
    monkeypatch.setenv("ISOTRAIN_START", "slowly")
    with pytest.raises(
        PlanError, match=r"way to start processes 'slowly'\. Available: forked, fresh"
    ):
        resolve_start_method(TorchDDP(), LOCAL, SPEC, "cpu")


def test_an_exit_by_an_unnamed_signal_is_described() -> None:
    assert signal_name(signal.SIGABRT) == "SIGABRT"
    assert signal_name(signal.SIGRTMIN + 1) == f"signal {signal.SIGRTMIN + 1}"
