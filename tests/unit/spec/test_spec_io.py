"""Reading specs from files and Python, overrides, writing, and the JSON Schema."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.spec.spec_samples import FIELDS, SMALL, TOML, YAML, refused, write

from isotrain.core.errors import SpecError
from isotrain.core.spec import import_strings
from isotrain.core.spec.import_strings import resolve
from isotrain.core.spec.loading import load_spec
from isotrain.core.spec.training_spec import TrainingSpec


@pytest.mark.parametrize(
    ("name", "text"),
    [("s.yaml", YAML), ("s.YML", YAML), ("s.toml", TOML), ("s.json", json.dumps(FIELDS))],
)
def test_formats_are_equivalent(tmp_path: Path, name: str, text: str) -> None:
    expected = TrainingSpec(**FIELDS)
    for source in (write(tmp_path, name, text), str(write(tmp_path, name, text))):
        spec = load_spec(source)
        assert spec == expected
    assert load_spec(FIELDS) == load_spec(expected) == expected


def test_written_specs_read_back_equal(tmp_path: Path) -> None:
    spec = load_spec(FIELDS)
    assert load_spec(spec.to_dict()) == spec
    assert load_spec(write(tmp_path, "a.json", json.dumps(spec.to_dict()))) == spec


def test_dump_describes_what_no_file_can_hold() -> None:
    spec = TrainingSpec(
        **{**SMALL, "model": math.hypot, "data": np.zeros((2, 3)), "metrics": [json.loads]},
        model_args={"scale": np.float64(0.5), "initial": np.ones(2), "limit": math.inf},
    )
    dumped = spec.to_dict()
    assert dumped["model"] == "math:hypot"
    assert dumped["data"] == "<numpy.ndarray float64 2x3>"
    assert dumped["metrics"] == ["json:loads"]
    assert dumped["model_args"]["scale"] == 0.5
    assert json.loads(json.dumps(dumped)) == dumped


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("3", 3),
        ("012", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("+4", 4),
        ("1:30", "1:30"),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("2001-01-01", "2001-01-01"),
        ("", None),
        ("~", None),
        ("'1e-3'", "1e-3"),
        ("math:hypot", "math:hypot"),
        ("[1, 2e0]", [1, 2.0]),
        ('{"a": 1}', {"a": 1}),
        ("1_000", "1_000"),
        (".inf", math.inf),
    ],
)
def test_yaml_scalars(tmp_path: Path, text: str, value: Any) -> None:
    read = load_spec(SMALL, [f"model_args.x={text}"]).model_args["x"]
    assert (read, type(read)) == (value, type(value))
    path = write(tmp_path, "s.yaml", yaml.safe_dump(SMALL) + f"model_args: {{x: {text}}}\n")
    if text:
        assert load_spec(path).model_args["x"] == value


def test_yaml_merges_anchors(tmp_path: Path) -> None:
    text = yaml.safe_dump(SMALL) + "model_args: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}}\n"
    assert load_spec(write(tmp_path, "s.yaml", text)).model_args["b"] == {"x": 1, "y": 3}


def test_yaml_builds_no_objects(tmp_path: Path) -> None:
    text = refused(write(tmp_path, "s.yaml", "model: !!python/name:os.system\n"))
    assert "s.yaml, line 1, column 8: could not determine a constructor" in text


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
"""A few lines that stand for 9 ** 10 values."""


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("s.yaml", "a: 1\nb: [1,\nc: }", "s.yaml, line 3, column 4: "),
        ("s.yaml", "epochs: 1\nseed: 2\nepochs: 3\n", "s.yaml, line 3, column 1: the key 'epochs'"),
        (
            "s.yaml",
            "optimizer:\n  lr: 1\n  lr: 2\n",
            "line 3, column 3: the key 'lr' is given twice",
        ),
        ("s.yaml", "a: 1\nb: \x07", "s.yaml, line 2, column 4: "),
        ("s.yaml", "- 1\n", "expected a table of fields at the top, got a list"),
        ("s.yaml", "model_args: &a {x: *a}\n", "alias refers to a value that contains it"),
        (
            "s.yaml",
            BOMB,
            "line 6, column 4: with its aliases it stands for more than 100,000 values",
        ),
        (
            "s.yaml",
            "seed: " + "1" * 5000,
            "s.yaml, line 1, column 7: a whole number of 5,000 digits",
        ),
        ("s.toml", "seed = " + "1" * 5000, "s.toml: Exceeds the limit"),
        ("s.json", '{"seed": ' + "1" * 5000 + "}", "s.json: Exceeds the limit"),
        ("s.yaml", "a: " + "[" * 3000, "s.yaml, line 1, column 1: it is nested too deeply"),
        ("s.toml", "a = " + "[" * 3000, "s.toml: it is nested too deeply"),
        ("s.json", '{"a": ' + "[" * 100_000, "s.json: it is nested too deeply"),
        ("s.json", '{"a": ' + "[" * 120 + "]" * 120 + "}", "s.json: it is nested too deeply"),
        ("s.yaml", "a: " + "{a: " * 120 + "1" + "}" * 120, "s.yaml: it is nested too deeply"),
        ("s.yaml", "", "is empty"),
        ("s.toml", "epochs = 1\nseed = = 2\n", "s.toml, line 2, column 8: Invalid value"),
        ("s.toml", "epochs = 1\nepochs = 2\n", "s.toml, line 2, column 11: Cannot overwrite"),
        ("s.toml", "epochs = 1\nseed = [", "s.toml, line 2, column 9: "),
        ("s.json", '{"epochs": 1,\n "seed" 2}', "s.json, line 2, column 9: Expecting ':'"),
        ("s.json", '{"seed": 1, "seed": 2}', "s.json: the key 'seed' is given twice"),
        ("s.json", "[]", "expected a table of fields at the top, got a list"),
        ("s.txt", "", "ends in one of .yaml, .yml, .toml, .json"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, part: str) -> None:
    assert part in refused(write(tmp_path, name, text))


def test_missing_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, "digits.yaml", YAML)
    assert "Did you mean 'digits.yaml'?" in refused(tmp_path / "digit.yaml")
    assert "There is no folder" in refused(tmp_path / "none" / "digit.yaml")
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read" in refused(tmp_path / "folder.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    assert "not UTF-8" in refused(tmp_path / "latin.yaml")
    assert "a spec is a path, a mapping or a TrainingSpec; got int" in refused(3)


def test_problems_name_the_file_and_come_together(tmp_path: Path) -> None:
    fields = {**SMALL, "model": "math:hypott", "optimizer": {"name": "adam", "lr": -1}, "epochs": 1}
    text = refused(write(tmp_path, "s.json", json.dumps(fields)))
    assert text.startswith(f"3 problems in {tmp_path / 's.json'}:\n")
    assert "model: got 'math:hypott'; expected an import path that exists" in text
    assert "Did you mean 'hypot'?" in text
    assert "optimizer.lr: got -1; expected a finite number > 0" in text
    assert "epochs and steps: got" in text


def test_every_reference_is_checked() -> None:
    fields = {
        **SMALL,
        "model": {"torch": "nowhere_a:x"},
        "data": "nowhere_b:x",
        "transform": "nowhere_c:x",
        "loss": {"torch": {"name": "nowhere_d:x"}},
        "metrics": ["accuracy", "nowhere_e:x"],
        "optimizer": {"custom": "nowhere_f:x", "lr": 1},
    }
    lines = refused(fields).splitlines()[1:]
    paths = [line.strip().partition(": ")[0] for line in lines]
    assert sorted(paths) == [
        "data",
        "loss.torch",
        "metrics.1",
        "model.torch",
        "optimizer.custom",
        "transform",
    ]
    unchecked = load_spec(fields, check_imports=False)
    assert unchecked == TrainingSpec(**fields)
    with pytest.raises(SpecError, match=r"(?s)6 problems.*nowhere_f"):
        load_spec(unchecked)


def test_imports_are_looked_up_once_and_again_in_a_changed_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up = []
    monkeypatch.setattr(import_strings, "problem", looked_up.append)
    loaded = load_spec(FIELDS)
    assert len(looked_up) == 4
    assert load_spec(loaded) is loaded
    assert len(looked_up) == 4
    for again in (loaded.replace(seed=5), loaded.model_copy(update={"seed": 5})):
        looked_up.clear()
        assert load_spec(again) == again
        assert len(looked_up) == 4
    assert load_spec(loaded, ["seed=5"]) == again


def test_files_named_in_a_spec_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "net.py", "def build():\n    return 7\n")
    path = write(tmp_path, "s.json", json.dumps({**SMALL, "model": "net.py:build"}))
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert resolve(load_spec(path).model)() == 7
    wrong = write(tmp_path, "t.json", json.dumps({**SMALL, "model": "nett.py:build"}))
    assert "Did you mean 'net.py'?" in refused(wrong)
    monkeypatch.chdir(tmp_path)
    assert TrainingSpec(**{**SMALL, "model": "net.py:build"}).model == load_spec(path).model


def test_loading_imports_nothing_that_the_spec_names(tmp_path: Path) -> None:
    write(tmp_path, "net.py", "raise RuntimeError('imported')\ndef build(): pass\n")
    fields = {
        **SMALL,
        "model": "net.py:build",
        "loss": "keras.losses:Huber",
        "metrics": ["torch:add"],
    }
    path = write(tmp_path, "s.json", json.dumps(fields))
    code = (
        "import sys; from isotrain.core.spec.loading import load_spec; load_spec(sys.argv[1])\n"
        "assert not {'torch', 'keras', 'tensorflow', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_a_strategy_and_loggers_that_come_with_the_source() -> None:
    own = {"name": "local-sgd", "options": {"every": 4}}
    fields = {**SMALL, "strategy": own, "loggers": "csv"}
    asked: dict[str, Any] = {"name": "gossip", "options": {"graph": "ring"}}
    for source in (fields, TrainingSpec(**fields)):
        assert load_spec(source, strategy="local-sgd") == TrainingSpec(**fields)
        found = load_spec(source, ["seed=3"], strategy=asked, loggers=["jsonl"])
        assert found == TrainingSpec(
            **{**fields, "seed": 3, "strategy": asked, "loggers": ["csv", "jsonl"]}
        )
    assert load_spec(SMALL, loggers=["csv"]).loggers == TrainingSpec(**fields).loggers
    with pytest.raises(SpecError, match="loggers"):
        load_spec({**SMALL, "loggers": 3}, loggers=["csv"])


SCRIPT = """
from helper_of_the_script import data
def model(): return "built"
spec = {"model": model, "data": data, "loss": "mse", "optimizer": "adam", "global_batch_size": 4, "epochs": 1}
def make(): return {**spec, "metrics": ["mae"]}
nothing = 3
"""


def test_a_spec_may_be_in_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are sent to processes that cannot import it, and its folder is on the path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "helper_of_the_script.py").write_text("def data(): return None\n")
    found = load_spec(f"{script}:spec", ["epochs=3"])
    assert (found.model(), found.epochs) == ("built", 3)
    assert [each.name for each in load_spec(f"{script}:make").metrics] == ["mae"]
    assert f"{script}:model" == found.to_dict()["model"]
    packed = tmp_path / "packed"
    packed.write_bytes(cloudpickle.dumps(found.model))
    unpack = f"import pickle; print(pickle.load(open({str(packed)!r}, 'rb'))())"
    told = subprocess.run(
        [sys.executable, "-c", unpack], capture_output=True, text=True, check=True
    )
    assert told.stdout == "built\n"
    with pytest.raises(
        SpecError, match=r"script\.py:nothing: it is a 'int'; expected a TrainingSpec"
    ):
        load_spec(f"{script}:nothing")


TEXT = st.text(st.characters(codec="utf-8")) | st.from_regex(r"[-+.0-9eExo:_]{1,6}", fullmatch=True)
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(
    args=st.dictionaries(st.text("abc_1-", min_size=1), PLAIN, max_size=3),
    lr=st.floats(1e-30, 1e30),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_values_survive_writing(
    tmp_path_factory: pytest.TempPathFactory, args: dict[str, Any], lr: float, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("specs")
    spec = TrainingSpec(
        **{**SMALL, "model_args": args, "seed": seed, "optimizer": {"name": "sgd", "lr": lr}}
    )
    assert load_spec(write(folder, "a.json", json.dumps(spec.to_dict()))) == spec
