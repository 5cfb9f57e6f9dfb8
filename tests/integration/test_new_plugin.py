"""The package that `isotrain new-plugin` makes, installed for real beside others: their tests pass."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.in_process import command
from plugins.example_plugin_tests import EXAMPLES

from isotrain.core.errors import PluginError
from isotrain.core.plugins.scaffold import make_plugin
from isotrain.testing import backend, strategy

ROOT = EXAMPLES.parent


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


class Guide(NamedTuple):
    """The page that leads to a first strategy.

    Attributes:
        commands: Its command lines that call isotrain, each without its first word.
        code: The strategy.
        place: The file that the strategy goes to.
    """

    commands: list[list[str]]
    code: str
    place: str


@pytest.fixture(scope="module")
def guide() -> Guide:
    page = (ROOT / "docs" / "first-strategy.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = [line for line in "".join(blocks).splitlines() if line.startswith("isotrain ")]
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (place,) = re.findall(r"Replace `(isotrain-lookahead/.*?)`", page)
    return Guide([shlex.split(line)[1:] for line in lines], code, place)


PACKAGES = {
    "strategy": "isotrain-tidy-averaging",
    "backend": "isotrain-tidy-numpy",
    "launcher": "isotrain-tidy-launcher",
    "logger": "isotrain-tidy-logger",
}
"""Package by the kind of its plugin, as `isotrain new-plugin` makes them."""


class Installed(NamedTuple):
    """Packages, installed beside this environment.

    Attributes:
        folder: Where those lie that `isotrain new-plugin` has made.
        site: Where they are installed.
        variables: With which they are found.
    """

    folder: Path
    site: Path
    variables: dict[str, str]


@pytest.fixture(scope="module")
def installed(guide: Guide, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A package of each kind as it is made, the guide's, and the example's; by one call of pip."""
    folder = tmp_path_factory.mktemp("new")
    site = folder / "site"
    made = [
        ["new-plugin", package.removeprefix("isotrain-"), "--kind", kind]
        for kind, package in PACKAGES.items()
    ]
    for arguments in (*made, guide.commands[0]):
        done = command(*arguments, folder=folder)
        assert done.returncode == 0, done.stderr
    assert (folder / guide.place).is_file()
    (folder / guide.place).write_text(guide.code, encoding="utf-8")
    example = EXAMPLES / "plugin_strategy_slowmo"
    shutil.copytree(example, folder / example.name)  # pip builds in the sources' own folder
    no_network = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    packages = (*PACKAGES.values(), "isotrain-lookahead", example.name)
    sources = [str(folder / package) for package in packages]
    call("-m", "pip", "install", *no_network, "--target", str(site), *sources, folder=folder)
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    return Installed(folder, site, {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""})


@pytest.mark.examples
def test_packages_pass_their_own_tests(installed: Installed) -> None:
    """New packages pass as they are generated; so does the example, with tests of its options.

    On a framework, `test_example_plugins.py` has the example pass the kit, and its test with numbers.
    """
    created = [installed.folder / package for package in PACKAGES.values()]
    folders = (*created, EXAMPLES / "plugin_strategy_slowmo")
    told = call(
        *("-m", "plugins.example_plugin_tests", *map(str, folders)),
        folder=installed.folder,
        variables=installed.variables | {"ISOTRAIN_TEST_BACKEND": "reference"},
    )
    averaging, numpy, launcher, logger, example = json.loads(told)
    assert f"{len(strategy.CHECKS) - 4} passed, 4 skipped" in averaging, averaging
    assert "does not say that it equals data parallelism" in averaging
    assert "does not say that it conserves gradient-sum" in averaging
    assert "no bfloat16-collectives: the backend does not declare" in numpy, numpy
    reasons = [line.partition(": ")[2] for line in numpy.splitlines() if "SKIPPED" in line]
    assert [reason.split()[-1] for reason in reasons] == [
        *("bfloat16", "step", "options", "start_updates)", "replicas", "replica", "isotrain")
    ], numpy
    assert "failed" not in numpy, numpy
    assert "3 passed" in launcher, launcher
    assert "3 passed" in logger, logger
    assert f"{len(strategy.CHECKS) - 5 + 3} passed, 5 skipped" in example, example


@pytest.mark.examples
@pytest.mark.usefixtures("few_digits", "without_plots")
def test_the_guide_leads_to_a_strategy_under_every_backend(
    guide: Guide, installed: Installed
) -> None:
    """One example per framework is measured in a fresh process, the others in a warm one."""
    _, check, listing, plan, run, compare = guide.commands
    assert check == ["conformance", "lookahead"]  # as the test of the template runs it
    shown = call("-m", "isotrain", *listing, folder=installed.folder, variables=installed.variables)
    row, _ = (line for line in shown.splitlines() if line.startswith("| lookahead"))
    assert row.count(" yes ") == 7  # also on `numpy` and on the new backend
    shutil.copytree(EXAMPLES, installed.folder / "examples")

    def told(*arguments: str) -> str:
        done = command(
            *(*arguments, "--plugin=isotrain_lookahead"),  # installed since plugins were looked for
            folder=installed.folder,
            path=[installed.site],
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def last_loss(*arguments: str) -> float:
        options = ("--set", "epochs=12", "--set", "threads=1", "--json")
        loss: float = json.loads(told(*arguments, *options).splitlines()[-1])["last_loss"]
        return loss

    assert "lookahead" in told(*plan)
    assert run[2:4] == ["--backend", "horovod-torch"]
    assert compare[2:12:2] == ["--backend"] * 5
    backends = compare[3:12:2]
    losses = {each: last_loss(*run[:3], each, *run[4:]) for each in backends}
    assert len(losses) == 5
    assert losses[run[3]] < 1
    assert losses == pytest.approx(dict.fromkeys(losses, losses[run[3]]), rel=1e-4)
    del compare[6:12]
    options = [
        "--steps",
        "24",
        "--repeats",
        "1",
        "--run-limit",
        "0.1s",
        "--output",
        "all",
        "--json",
    ]
    cells = json.loads(told(*compare, "--set", "epochs=12", *options))["cells"]
    assert [(cell["backend"], cell["status"]) for cell in cells] == [
        (each, "finished") for each in ("torch-ddp", "tf-mirrored")
    ]
    for cell in cells:
        assert cell["last_loss"] == pytest.approx(losses[run[3]], rel=1e-4)


def test_the_page_has_the_code_of_a_new_backend(tmp_path: Path) -> None:
    """It has every required method, and what it imports is there; its own tests pass, see above."""
    folder = make_plugin("abacus", tmp_path / "abacus", "backend")
    page = (ROOT / "docs" / "first-backend.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    modules = [folder / "isotrain_abacus" / name for name in ("adapter.py", "group.py")]
    assert blocks == [module.read_text(encoding="utf-8") for module in modules]
    assert sum(map(_lines_of_code, blocks)) < 150
    for block, names in zip(blocks, (["Abacus"], ["AbacusReplica", "AbacusGroup"]), strict=True):
        defined: dict[str, Any] = {"__name__": "abacus"}
        exec(block, defined)
        assert not [name for name in names if defined[name].__abstractmethods__]
    assert f"2 replicas: {len(backend.CHECKS) - 7} passed, 0 failed, 7 skipped" in page


def _lines_of_code(source: str) -> int:
    """Number of lines without blank lines, comments and docstrings."""
    tree = ast.parse(source)
    documented = [
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
    ]
    left_out = {n for each in documented for n in range(each.lineno, (each.end_lineno or 0) + 1)}
    lines = enumerate(map(str.strip, source.splitlines()), start=1)
    return sum(number not in left_out and line[:1] not in ("", "#") for number, line in lines)


@pytest.mark.parametrize("name", ["Tidy", "tidy_averaging", "-tidy", "tidy-", "2tidy", "a b", ""])
def test_a_name_that_cannot_be_one_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="expected a name such as 'my-logger'"):
        make_plugin(name, tmp_path, "logger")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    folder = make_plugin("tidy", tmp_path / "tidy")
    (folder / "README.md").write_text("mine")
    with pytest.raises(PluginError, match="cannot be created"):
        make_plugin("tidy", tmp_path / "tidy", "launcher")
    assert (folder / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("strategy", "data-parallel"),
        ("backend", "torch-ddp"),
        ("launcher", "local"),
        ("logger", "csv"),
    ],
)
def test_a_name_that_is_taken_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=f"the {kind} '{name}' is already registered"):
        make_plugin(name, tmp_path, kind)


def test_a_name_may_be_that_of_another_kind(tmp_path: Path) -> None:
    assert make_plugin("csv", tmp_path / "csv", "launcher").is_dir()


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    done = command("new-plugin", "tidy", "--kind", "laucher", folder=tmp_path)
    assert done.returncode == 2
    assert "unknown kind of plugin 'laucher'. Did you mean 'launcher'?" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_kind_is_in_the_json(tmp_path: Path) -> None:
    done = command("new-plugin", "tidy", "--kind", "logger", "--json", folder=tmp_path)
    assert json.loads(done.stdout) == {"format": 1, "kind": "logger", "folder": "isotrain-tidy"}
