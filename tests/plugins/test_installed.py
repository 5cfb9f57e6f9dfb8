"""Plugins of really installed packages, sound and broken, in the listing and in runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isotrain.core.plugins.plugin import SLOW_SECONDS

HERE = Path(__file__).parent
SPEC = """\
model: zoo-line
data: data.py:data
loss: mean_squared_error
optimizer: {name: sgd, lr: 0.125}
global_batch_size: 4
epochs: 1
strategy: zoo-native
plugins: isotrain.testing.reference
"""
DATA = """\
import numpy as np

def data():
    inputs = np.arange(24.0).reshape(12, 2) / 24
    return (inputs, inputs[:, :1])
"""
FAULTS = {
    "missing": "No module named 'zoo_that_is_not_there'",
    "broken": "RuntimeError: half installed",
    "exits": "SystemExit: 3",
    "misspelled": "'isotrain_register_stategies'. Did you mean 'isotrain_register_strategies'?",
    "unmarked": "isotrain_register_strategies is not marked with @isotrain.hookimpl",
    "future": "it needs version 2.0 of the plugin interface, and this isotrain has 1.0",
    "raises": "isotrain_register_backends: KeyError: 'configuration'",
    "taken": "isotrain_register_strategies: registering a strategy: the name 'data-parallel' is taken",
    "arguments": "isotrain_epoch_ended has no parameter mistakes; it has epoch, step, metrics",
    "hookless": "it implements no hook",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which both packages are installed, by pip."""
    folder = tmp_path_factory.mktemp("installed")
    sources = [shutil.copytree(HERE / name, folder / "src" / name) for name in ("zoo", "twin")]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site")]
    subprocess.run([*command, *map(str, sources)], check=True)
    return folder / "site"


def isotrain(
    site: Path, *arguments: str, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-m", "isotrain", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def listing(site: Path) -> dict[str, Any]:
    """What `isotrain plugins` says of each, by name and distribution, and what it printed."""
    finished = isotrain(site, "plugins", "--json")
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)["plugins"]
    return {"said": finished.stderr, **{(p["name"], p["distribution"]): p for p in found}}


def of_zoo(listing: dict[str, Any], name: str) -> Any:
    return listing[name, "isotrain-zoo"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_plugin_is_left_out_with_its_fault(listing: dict[str, Any], name: str) -> None:
    found = of_zoo(listing, name)
    assert found["status"] == "broken"
    assert FAULTS[name] in found["fault"]
    assert found["registered"] == {}


def test_other_plugins_load(listing: dict[str, Any]) -> None:
    found = of_zoo(listing, "good")
    assert (found["status"], found["source"]) == ("loaded", "entry point")
    assert (found["version"], found["api"], found["origin"]) == ("3.1", "1.0", "zoo_good")
    assert found["registered"] == {
        "strategies": ["zoo-native", "zoo-lazy"],
        "models": ["zoo-line"],
        "loggers": ["zoo-failing"],
    }
    assert "isotrain_run_finished" in found["hooks"]
    assert of_zoo(listing, "class")["registered"] == {"strategies": ["zoo-class"]}


def test_registration_by_reference_imports_nothing(listing: dict[str, Any]) -> None:
    assert "zoo_lazy was imported" not in listing["said"]


def test_a_slow_import_is_measured_and_noted(listing: dict[str, Any]) -> None:
    assert of_zoo(listing, "slow")["import_s"] > SLOW_SECONDS
    for name in ("slow", "good"):
        plugin = of_zoo(listing, name)
        is_slow = plugin["import_s"] > SLOW_SECONDS
        assert ("every command waits for" in " ".join(plugin["notes"])) == is_slow


def test_a_name_taken_by_another_package(listing: dict[str, Any]) -> None:
    twin = listing["good", "isotrain-zz-twin"]
    assert twin["status"] == "broken"
    assert "another plugin has that name: isotrain-zoo" in twin["fault"]


def test_blocking_by_option_and_by_variable(site: Path) -> None:
    finished = isotrain(
        site, "plugins", "--json", "--block-plugin", "good", ISOTRAIN_BLOCKED_PLUGINS="slow, x"
    )
    status = {p["name"]: p["status"] for p in json.loads(finished.stdout)["plugins"]}
    assert (status["good"], status["slow"], status["class"]) == ("blocked", "blocked", "loaded")
    unknown = isotrain(site, "plugins", "--block-plugin", "goood")
    assert unknown.returncode == 2
    assert "unknown plugin 'goood'. Did you mean 'good'?" in unknown.stderr


def test_other_commands_name_the_broken_ones(site: Path) -> None:
    finished = isotrain(site, "strategies", ISOTRAIN_BLOCKED_PLUGINS="slow")
    assert finished.returncode == 0
    assert "zoo-native" in finished.stdout
    for name, fault in FAULTS.items():
        assert f"plugin {name!r} was left out: " in finished.stderr
        assert fault in finished.stderr


def test_a_run_with_an_installed_strategy_and_model(site: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "data.py").write_text(DATA)
    finished = isotrain(
        *(site, "run", "spec.yaml", "--backend", "reference", "--replicas", "2"),
        *("--output", "out", "--logger", "zoo-failing", "--logger", "csv"),
        folder=tmp_path,
        ISOTRAIN_BLOCKED_PLUGINS="slow",
        ZOO_FILE=str(tmp_path / "told"),
    )
    assert finished.returncode == 0, finished.stderr
    assert "zoo-native is here" in finished.stdout
    assert "zoo-native is here" in (tmp_path / "out" / "rank-1.log").read_text()
    assert (tmp_path / "told").read_text() == "zoo-native"
    assert "logger 'zoo-failing': steps_done: OSError: no room left" in finished.stderr
    assert len((tmp_path / "out" / "steps.csv").read_text().splitlines()) == 4


def test_a_blocked_plugin_is_missing_in_the_run(site: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "data.py").write_text(DATA)
    finished = isotrain(
        *(site, "plan", "spec.yaml", "--backend", "reference", "--no-measure"),
        *("--block-plugin", "good"),
        folder=tmp_path,
        ISOTRAIN_BLOCKED_PLUGINS="slow",
    )
    assert finished.returncode == 2
    assert "unknown model 'zoo-line'" in finished.stderr
