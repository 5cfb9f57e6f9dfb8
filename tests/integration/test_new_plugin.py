"""The package that `isotrain new-plugin` makes: installed for real, its tests pass at once."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from isotrain.core.errors import PluginError
from isotrain.core.plugins.new_plugin import make_plugin
from isotrain.testing import strategy

ROOT = Path(__file__).resolve().parents[2]


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


def installed(package: Path) -> dict[str, str]:
    """Installs a package beside this environment; the variables with which it is found."""
    site = package.parent / "site"
    no_network = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    call("-m", "pip", "install", *no_network, "--target", str(site), ".", folder=package)
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    return {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""}


@pytest.mark.slow
def test_a_new_plugin_installs_and_passes_its_tests(tmp_path: Path) -> None:
    call("-m", "isotrain", "new-plugin", "tidy-averaging", folder=tmp_path)
    package = tmp_path / "isotrain-tidy-averaging"
    variables = installed(package)
    told = call("-m", "pytest", "-q", "-rs", folder=package, variables=variables)
    assert f"{len(strategy.CHECKS) - 2} passed, 2 skipped" in told, told
    assert "does not say that it equals data parallelism" in told
    assert "does not say that it conserves gradient-sum" in told


def commands(page: str) -> list[list[str]]:
    """The command lines of a page that call isotrain."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("isotrain ")]


@pytest.mark.slow
def test_the_guide_leads_to_a_strategy_under_every_backend(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "first-strategy.md").read_text(encoding="utf-8")
    new, check, listing, plan, run, compare = commands(page)
    call("-m", "isotrain", *new, folder=tmp_path)
    package = tmp_path / "isotrain-lookahead"
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (named,) = re.findall(r"Replace `isotrain-lookahead/(.*?)`", page)
    assert (package / named).is_file()
    (package / named).write_text(code, encoding="utf-8")
    variables = installed(package)
    path = os.pathsep.join([str(ROOT / "tests" / "standins"), variables["PYTHONPATH"]])
    variables["PYTHONPATH"] = path  # with the digits, which to import takes each process a second
    shutil.copytree(ROOT / "examples", tmp_path / "examples")

    def told(*arguments: str) -> str:
        return call("-m", "isotrain", *arguments, folder=tmp_path, variables=variables)

    assert check == ["conformance", "lookahead"]  # as the test of the template runs it
    (row,) = [line for line in told(*listing).splitlines() if line.startswith("| lookahead")]
    assert row.count(" yes ") == 5
    assert "lookahead" in told(*plan)
    assert json.loads(told(*run, "--set", "epochs=1", "--json").splitlines()[-1])["final_loss"] < 1
    # Of the five that are compared there, one of each framework: they start cold, as measured programs do.
    assert compare[2:12:2] == ["--backend"] * 5
    del compare[6:12]
    options = ("--set", "epochs=1", "--repeat", "1", "--output", "all", "--json")
    compared = json.loads(told(*compare, *options))
    assert [cell["status"] for cell in compared["cells"]] == ["finished"] * 2
    assert all(cell["loss_difference"] < 1e-4 for cell in compared["cells"])


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


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="there is a strategy 'data-parallel' already"):
        make_plugin("data-parallel", tmp_path)
