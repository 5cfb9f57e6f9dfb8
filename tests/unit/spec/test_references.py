"""Import references: resolving, describing, and looking without importing."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from isotrain.core.errors import SpecError
from isotrain.core.spec import import_strings

MODULE = """
import math as arithmetic
from json import loads, dumps as write
LIMIT: int = 3
first, (second, *third) = 1, (2, 3)
try:
    import no_such_module
except ImportError:
    fallback = True
if LIMIT > 2:
    def build(width=1):
        hidden = 2
        return width
class Net:
    class Inner:
        size = 4
    def __init__(self):
        self.unseen = 1
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `shop` on the import path that fails if anything imports it."""
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "models.py").write_text(MODULE)
    (folder / "stars.py").write_text("from math import *\n")
    (folder / "made.py").write_text("globals()['x'] = 1\n")
    (folder / "lazy.py").write_text("def __getattr__(name): return name\n")
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A Python file that is on no import path."""
    path = tmp_path / "my model.py"
    path.write_text(MODULE)
    return path


NAMES = ["arithmetic", "loads", "write", "LIMIT", "first", "third", "fallback", "build", "Net"]


@pytest.mark.parametrize("name", [*NAMES, "no_such_module", "Net.Inner.size"])
def test_bound_names_are_found_without_importing(package: Path, name: str) -> None:
    assert import_strings.problem(f"shop.models:{name}") is None
    assert "shop" not in sys.modules


@pytest.mark.parametrize("name", ["hidden", "width", "Inner", "unseen", "dumps", "size"])
def test_names_of_inner_scopes_are_not_found(package: Path, name: str) -> None:
    assert f"has no {name!r}" in str(import_strings.problem(f"shop.models:{name}"))


@pytest.mark.parametrize("module", ["stars", "made", "lazy"])
def test_undecidable_references_are_accepted(package: Path, module: str) -> None:
    assert import_strings.problem(f"shop.{module}:anything") is None


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("shop.models:biuld", ["module 'shop.models' has no 'biuld'", "Did you mean 'build'?"]),
        ("shop.modles:build", ["no module 'modles' in 'shop'", "Did you mean 'models'?"]),
        ("shopp.models:build", ["no module 'shopp'", "Did you mean 'shop'?"]),
        ("shop.models.deep:x", ["no module 'deep' in 'shop.models'"]),
        ("shop.broken:f", ["module 'shop.broken' has a syntax error in line 2"]),
        ("json:lods", ["module 'json' has no 'lods'", "Did you mean 'loads'?"]),
        ("shop.models", ["not of the form", '"package.module:name"']),
        ("shop models:x", ["not of the form"]),
        (":x", ["not of the form"]),
        ("shop.models:", ["not of the form"]),
        ("shop.models:a.", ["not of the form"]),
    ],
)
def test_problems_name_the_part_and_the_nearest(
    package: Path, reference: str, parts: list[str]
) -> None:
    text = str(import_strings.problem(reference))
    assert all(part in text for part in parts), text
    assert "shop" not in sys.modules


def test_problems_of_files(file: Path) -> None:
    assert import_strings.problem(f"{file}:build") is None
    assert "Did you mean 'build'?" in str(import_strings.problem(f"{file}:buil"))
    missing = str(import_strings.problem(f"{file.parent}/my modle.py:build"))
    assert "there is no file" in missing
    assert "Did you mean 'my model.py'?" in missing


def test_checking_references_imports_no_framework() -> None:
    code = """
import sys
from isotrain.core.spec import import_strings
assert import_strings.problem("torch.nn:Module") is None
assert import_strings.problem("keras.losses:Hubr") is not None
assert import_strings.problem("tensorflow.keras:Model") is None
heavy = {"torch", "tensorflow", "keras"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_resolve() -> None:
    assert import_strings.resolve("math:hypot") is math.hypot
    assert import_strings.resolve("json:JSONDecoder.decode") is json.JSONDecoder.decode
    assert import_strings.resolve(math.hypot) is math.hypot


def test_resolve_imports_a_file_once(file: Path) -> None:
    build = import_strings.resolve(f"{file}:build")
    assert build(5) == 5
    assert import_strings.resolve(f"{file.parent}/./{file.name}:build") is build
    assert import_strings.resolve(f"{file}:Net.Inner.size") == 4


def test_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "net.py").write_text(f"size = {number}\n")
    sizes = [import_strings.resolve(f"{tmp_path}/{number}/net.py:size") for number in (1, 2)]
    assert sizes == [1, 2]


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        ("math:hypott", "'math' has no 'hypott'. Did you mean 'hypot'?"),
        ("json.decodr:x", "no module 'decodr' in 'json'. Did you mean 'decoder'?"),
        ("shop.models:build", "importing module 'shop.models' failed: RuntimeError: imported"),
        ("nonsense", "not of the form"),
    ],
)
def test_resolve_names_the_problem(package: Path, reference: str, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        import_strings.resolve(reference)
    assert part in str(caught.value)


def test_a_dependency_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "needy.py"
    path.write_text("import no_such_dependency\n")
    for _ in range(2):
        with pytest.raises(SpecError, match=r"ModuleNotFoundError.*'no_such_dependency'"):
            import_strings.resolve(f"{path}:x")
    path.write_text("x = 1\n")
    assert import_strings.resolve(f"{path}:x") == 1


def test_describe(file: Path) -> None:
    assert import_strings.describe("a.b:c") == "a.b:c"
    assert import_strings.describe(math.hypot) == "math:hypot"
    assert import_strings.describe(json.JSONDecoder.decode) == "json.decoder:JSONDecoder.decode"
    assert import_strings.describe(functools.partial(math.hypot, 1)) == "<partial of math:hypot>"
    assert import_strings.describe(np.zeros((3, 2), "float32")) == "<numpy.ndarray float32 3x2>"
    assert import_strings.describe(object()) == "<builtins.object>"
    build = import_strings.resolve(f"{file}:build")
    assert import_strings.resolve(import_strings.describe(build)) is build


def test_a_function_of_a_file_that_is_not_loaded_here_has_the_name_of_the_file(file: Path) -> None:
    build = import_strings.resolve(f"{file}:build")
    build.__module__ = f"{build.__module__}_of_another_process"
    told = import_strings.describe(build)
    assert told == "my_model_of_another_process.py:build"


def _local() -> Callable[[], int]:
    def inner() -> int:
        return 1

    return inner


def test_is_importable(file: Path) -> None:
    assert import_strings.is_importable(math.hypot)
    assert import_strings.is_importable(json.JSONDecoder)
    assert not import_strings.is_importable(_local())
    assert not import_strings.is_importable(lambda: 1)
    assert not import_strings.is_importable(functools.partial(math.hypot, 1))
    assert not import_strings.is_importable(import_strings.resolve(f"{file}:build"))


def test_is_importable_is_false_for_what_a_name_no_longer_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = json.JSONDecoder
    monkeypatch.setattr("json.decoder.JSONDecoder", type("JSONDecoder", (), {}))
    assert not import_strings.is_importable(old)


def test_is_importable_is_false_in_main() -> None:
    code = """
from isotrain.core.spec import import_strings
def build(): pass
assert not import_strings.is_importable(build)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
