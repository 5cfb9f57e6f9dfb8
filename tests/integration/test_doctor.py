"""The doctor, on this installation and on ones that are really half broken."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.isolated import run_isolated
from helpers.stand_in_nvml import StandInNvml

import isotrain
from isotrain.core.errors import IsotrainError
from isotrain.core.planning.doctor import examine, examine_here
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.reporting import text as texts

NO_PROXY = "http://127.0.0.1:9"
"""Where nobody listens: whatever goes there fails."""
TORCH = ("torch-ddp", "horovod-torch")
TENSORFLOW = ("tf-mirrored", "tf-multiworker", "horovod-tf")


def doctor(*arguments: str, first_on_path: Path | None = None) -> str:
    variables = dict(os.environ)
    if first_on_path is not None:
        variables["PYTHONPATH"] = str(first_on_path)
    command = [sys.executable, "-m", "isotrain", "doctor", *arguments]
    found = subprocess.run(command, text=True, capture_output=True, env=variables, timeout=240)
    assert found.returncode == 0, found.stderr
    assert not found.stderr
    return found.stdout


def backends(first_on_path: Path, *names: str) -> dict[str, dict[str, Any]]:
    asked = [f"--backend={name}" for name in names]
    asked += ["--plugin=isotrain.testing.reference"] if "reference" in names else []
    found = json.loads(doctor("--json", *asked, first_on_path=first_on_path))
    return {backend["name"]: backend for backend in found["backends"]}


def test_driver_and_lost_gpus_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVML is loaded by its name."""
    StandInNvml(monkeypatch, tmp_path).becomes(
        "driver 580.159\ngpu 0 GPU-1 81559\ngpu 15 GPU-2 0\n"
    )
    lines = doctor("--backend=reference", "--plugin=isotrain.testing.reference").splitlines()
    for name, value in (
        ("gpus", "1"),
        ("nvidia driver", "580.159"),
        ("gpu faults", "GPU 1: GPU is lost"),
    ):
        assert any(line.split() == f"{name} {value}".split() for line in lines), lines


def package(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    """What the doctor finds on this installation."""
    with mock.patch.dict(os.environ, http_proxy=NO_PROXY):
        found: dict[str, Any] = json.loads(doctor("--json"))
    return found


@pytest.mark.features
def test_everything_is_available_here(here: dict[str, Any]) -> None:
    found = here
    assert found["format"] == 1
    assert found["machine"]["cores"] >= 1
    assert found["python"]["executable"] == sys.executable
    assert found["plugin_faults"] == {}
    assert "http_proxy" in found["proxies"]
    assert {each["name"]: each["available"] for each in found["frameworks"]} == {
        "torch": True,
        "tensorflow": True,
        "numpy": True,
    }
    host = plugin_manager()
    assert [backend["name"] for backend in found["backends"]] == host.backends.names()
    for backend in found["backends"]:
        assert backend["available"], backend
        assert backend["version"]
        adapter = host.backend(backend["name"])
        assert set(backend["versions"]) >= {adapter.framework}
        collectives = {each["name"]: each for each in backend["collectives"]}
        assert list(collectives) == list(adapter.collectives)
        assert all(collectives[name]["available"] for name in {"auto", "gloo"} & set(collectives))
        for each in backend["collectives"]:
            assert each["available"] == (each["reason"] is None)


@pytest.mark.features
def test_text_for_people(here: dict[str, Any]) -> None:
    text = texts.doctor(here)
    assert "http_proxy; ranks connect to each other without them" in " ".join(text.split())
    for backend in here["backends"]:
        assert f"| {backend['name']} " in text
        for each in backend["collectives"]:
            assert f"| {backend['name']}:{each['name']} " in text
            assert each["available"] or f"{each['reason']}; {each['hint']}" in text


@pytest.mark.features
def test_a_tensorflow_that_fails_to_import(tmp_path: Path) -> None:
    package(tmp_path, "tensorflow", 'raise ImportError("libmissing.so.7: no such file")')
    found = backends(tmp_path, *TENSORFLOW, "reference")
    assert list(found) == [*TENSORFLOW, "reference"]
    for name in TENSORFLOW:
        assert not found[name]["available"]
        assert "libmissing.so.7" in found[name]["reason"]
        assert found[name]["hint"]
        assert not any(each["available"] for each in found[name]["collectives"])
    assert found["reference"]["available"], found["reference"]


@pytest.mark.features
def test_frameworks_that_bring_their_process_down(tmp_path: Path) -> None:
    aborts = 'import os, sys; print("bad ABI", file=sys.stderr, flush=True); os.abort()'
    package(tmp_path, "tensorflow", aborts)
    package(tmp_path, "torch", "import os; os._exit(139)")
    found = backends(tmp_path)
    for name in TENSORFLOW:
        assert not found[name]["available"]
        assert "SIGABRT" in found[name]["reason"]
        assert "bad ABI" in found[name]["reason"]
    for name in TORCH:
        assert not found[name]["available"]
        assert "exit code 139" in found[name]["reason"]


@pytest.mark.features
def test_a_horovod_whose_extension_cannot_be_loaded(tmp_path: Path) -> None:
    package(tmp_path, "horovod", "")
    torch = tmp_path / "horovod" / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("from horovod.torch import mpi_lib_v2")
    (torch / "mpi_lib_v2.cpython-so.so").write_bytes(b"this is no shared library")
    (torch / "mpi_lib_v2.py").write_text("raise ImportError('undefined symbol: _ZN2at4_ops')")
    found = backends(tmp_path, "horovod-torch", "horovod-tf")
    assert not found["horovod-torch"]["available"]
    assert "undefined symbol" in found["horovod-torch"]["reason"]
    assert found["horovod-torch"]["hint"]
    assert not found["horovod-tf"]["available"]


ENDING = """
import os
from isotrain import hookimpl
from isotrain.testing.reference.adapter import Reference

class Ending(Reference):
    name = "ending"
    def examine(self):
        os._exit(3)

@hookimpl
def isotrain_register_backends(register):
    register.add(Ending)
"""


@pytest.mark.features
def test_a_crashing_backend_hides_no_other_of_its_framework(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    plugins = (f"--plugin={tmp_path}/ending.py", "--plugin=isotrain.testing.reference")
    found = json.loads(doctor("--json", *plugins, "--backend=ending", "--backend=reference"))
    ending, reference = found["backends"]
    assert ending["framework"] == reference["framework"]
    assert "exit code 3" in ending["reason"]
    assert reference["available"]


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(IsotrainError, match="Did you mean 'torch-ddp'"):
        examine(plugin_manager(), ["torch-dpp"])


@pytest.mark.slow
def test_private_api_of_torch_and_keras_is_unchanged(tmp_path: Path) -> None:
    """It is among the everyday tests, for upgrades; `here` covers TensorFlow and Horovod too."""
    work = functools.partial(examined, plugins=[], names=["torch-ddp"])
    found = run_isolated(work, {**SPEC, "model": model}, "torch-ddp", tmp_path / "run")["torch-ddp"]
    assert found["backend"]["available"], found["backend"]["reason"]


@pytest.mark.features
def test_a_framework_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "torch", "import time; time.sleep(1000)")
    package(tmp_path, "tensorflow", "import time; time.sleep(1000)")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = examine(PluginManager(entry_points=False), ["torch-ddp", "tf-mirrored"], seconds=2)
    assert [backend["available"] for backend in found["backends"]] == [False] * 2
    reasons = [backend["reason"] for backend in found["backends"]]
    assert reasons == ["loading it did not end within 2 s"] * 2


CHANGED = """
from isotrain import hookimpl
from isotrain.adapters.horovod.torch_adapter import HorovodTorch
from isotrain.adapters.tensorflow.adapter import TFMirrored
from isotrain.adapters.torch.adapter import TorchDDP

class ChangedKeras(TorchDDP):
    name = "changed-keras"
    def examine(self):
        import keras
        del keras.Layer._flatten_layers
        return super().examine()

class ChangedTensorFlow(TFMirrored):
    name = "changed-tensorflow"
    def examine(self):
        import tensorflow as tf
        tf.Module._flatten = lambda self, predicate: []
        return super().examine()

class ChangedHorovod(HorovodTorch):
    name = "changed-horovod"
    def examine(self):
        import horovod.torch as hvd
        hvd.nccl_built = lambda: True
        return super().examine()

class ChangedTorch(TorchDDP):
    name = "changed-torch"
    def examine(self):
        from torch.fx.experimental import proxy_tensor
        proxy_tensor.get_proxy_slot = lambda *given: None
        return super().examine()

@hookimpl
def isotrain_register_backends(register):
    for adapter in (ChangedKeras, ChangedTensorFlow, ChangedHorovod, ChangedTorch):
        register.add(adapter)
"""


CHANGED_PARTS = {
    "changed-horovod": "Horovod .* has changed private APIs.*: the class names in its library",
    "changed-keras": "Keras .* has changed private APIs.*: Layer._flatten_layers .AttributeError",
    "changed-torch": "torch .* has changed private APIs.*: fx.experimental.proxy_tensor.* .AttributeError",
    "changed-tensorflow": "TensorFlow .* has changed private APIs.*: Module._flatten .RuntimeError",
}
"""Backend to what must be said of it."""

SPEC: dict[str, Any] = {
    "data": (np.ones((2, 1), "float32"), np.ones((2, 1), "float32")),
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.5},
    "global_batch_size": 2,
    "steps": 1,
    "threads": 1,
}


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


def examined(
    session: isotrain.Session, plugins: Sequence[Path], names: Sequence[str]
) -> dict[str, Any]:
    """What is found where the frameworks have been imported."""
    session.close()
    return examine_here({"names": names, "requested": [*map(str, plugins)], "blocked": []})


@pytest.mark.features
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("torch-ddp", ["changed-horovod", "changed-keras", "changed-torch"]),
        ("tf-mirrored", ["changed-tensorflow"]),
    ],
)
def test_a_changed_private_api_is_named(backend: str, names: list[str], tmp_path: Path) -> None:
    plugin = tmp_path / "changed.py"
    plugin.write_text(CHANGED)
    work = functools.partial(examined, plugins=[plugin], names=names)
    told = run_isolated(work, {**SPEC, "model": model}, backend, tmp_path / "run")
    for name in names:
        found = told[name]["backend"]
        assert not found["available"]
        assert re.match(CHANGED_PARTS[name], found["reason"]), found["reason"]
        assert "install a version of" in found["hint"]
