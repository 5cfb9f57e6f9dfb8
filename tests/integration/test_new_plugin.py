"""The package that `isotrain new-plugin` makes: installed for real, its tests pass at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from isotrain.core.errors import PluginError
from isotrain.core.new_plugin import make_plugin


def call(*arguments: str, folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """What a program of this Python prints; it must end well."""
    completed = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | (variables or {}),
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.slow
def test_a_new_plugin_installs_and_passes_its_tests(tmp_path: Path) -> None:
    call("-m", "isotrain", "new-plugin", "tidy-averaging", folder=tmp_path)
    package, site = tmp_path / "isotrain-tidy-averaging", tmp_path / "site"
    no_network = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    call("-m", "pip", "install", *no_network, "--target", str(site), ".", folder=package)
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    variables = {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    listed = call("-m", "isotrain", "strategies", folder=package, variables=variables)
    assert "tidy-averaging" in listed
    told = call("-m", "pytest", "-q", "-rs", folder=package, variables=variables)
    assert "8 passed, 2 skipped" in told, told
    assert "does not say that it equals data parallelism" in told
    assert "does not say that it conserves gradient-sum" in told


@pytest.mark.parametrize("name", ["Tidy", "tidy_averaging", "-tidy", "tidy-", "2tidy", "a b", ""])
def test_a_name_that_cannot_be_one_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="not of the form of 'my-strategy'"):
        make_plugin(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    folder = make_plugin("tidy", tmp_path)
    (folder / "README.md").write_text("mine")
    with pytest.raises(PluginError, match="cannot be made"):
        make_plugin("tidy", tmp_path)
    assert (folder / "README.md").read_text() == "mine"
