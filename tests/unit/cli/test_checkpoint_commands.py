"""`isotrain checkpoint` shows, compares, checks and removes what is there, for people and as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import main

WEIGHTS = np.arange(6.0, dtype="float32").reshape(2, 3)
PLAN = {"backend": "reference", "replicas": 2, "strategy": "data-parallel"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two checkpoints."""
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    facts = {"plan": PLAN, "versions": {"isotrain": "0.1.0"}}
    other = WEIGHTS.copy()
    other[1, 2] = 5.5
    for step, array in ((100, WEIGHTS), (200, other)):
        half = TensorPart(np.ones(4, "float32"), "bfloat16")
        state = {
            "w": TensorPart(array),
            "half": half,
            f"of-{step}": TensorPart(np.array([math.nan])),
        }
        folder.save(step, sections={"state": state}, run=facts)
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    """What the command prints as JSON; as text it prints something too."""
    command = ["checkpoint", *map(str, arguments)]
    assert main(command) == code
    text = capsys.readouterr()
    assert text.out or code == ExitCode.USAGE
    assert main([*command, "--json"]) == code
    return text.out + text.err, json.loads(capsys.readouterr().out)


def test_the_newest_checkpoint_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, found = said(capsys, "show", run)
    assert found["step"] == 200
    assert {name: found[name] for name in PLAN} == PLAN
    (section,) = found["sections"]
    kind = {"shape": [4], "dtype": "bfloat16"}
    assert section["tensors"][0] == {"name": "half", **kind, "bytes": 8, "parts": 1}
    assert found["bytes"] == 8 + 24 + 8
    for word in ("200", "reference", "isotrain: 0.1.0", "bfloat16", "2x3", "24 B", "of-200"):
        assert word in text


def test_control_characters_in_names_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm = "\x1b]0;harm\x07\x9b2J\u202e"
    for folder in ("one", "two"):
        CheckpointFolder(tmp_path / folder).save(
            1,
            sections={"state": {folder + harm: TensorPart(WEIGHTS)}},
            run={"plan": {"backend": harm}},
        )
    ends = (tmp_path / "one", tmp_path / "two")
    said_of_it = [said(capsys, "show", ends[0])[0]]
    said_of_it.append(said(capsys, "diff", *ends, code=ExitCode.DIFFERENT)[0])
    (tmp_path / harm).mkdir()
    said_of_it.append(said(capsys, "show", tmp_path / harm, code=ExitCode.USAGE)[0])
    for text in said_of_it:
        assert r"\x1b]0;harm\x07\x9b2J\u202e" in text
        assert not set(harm) & set(text) - set("]0;harm2J")


def test_a_checkpoint_is_found_by_its_own_path(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "show", run / "checkpoints" / "step-000000100")[1]["step"] == 100
    assert said(capsys, "show", f"{run}/checkpoints/")[1]["step"] == 200


def test_differences_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = run / "checkpoints" / "step-000000100"
    text, found = said(capsys, "diff", before, run, code=ExitCode.DIFFERENT)
    (tensor,) = found["tensors"]
    assert (tensor["name"], tensor["numbers"], tensor["differing"]) == ("w", 6, 1)
    assert (tensor["largest"], tensor["relative"]) == (0.5, 0.1)
    assert found["only_in_one"] == ["state: of-100"]
    assert found["only_in_other"] == ["state: of-200"]
    assert "0.5" in text
    assert "of-100" in text
    assert said(capsys, "diff", run, run)[1]["tensors"] == []


def test_dtypes_shapes_and_nan_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = {
        "same": (np.array([1.0, math.nan, math.inf]), np.array([1.0, math.nan, math.inf])),
        "nan": (np.array([1.0, 2.0]), np.array([math.nan, 2.0])),
        "dtype": (np.ones(3, "float32"), np.ones(3, "float64")),
        "shape": (np.ones(3), np.ones((3, 1))),
        "whole": (np.array([2**63], "uint64"), np.array([2**63 + 1], "uint64")),
        "truth": (np.array([True]), np.array([False])),
        "complex": (np.array([1 + 1j], "complex64"), np.array([1 + 2j], "complex64")),
    }
    for side in range(2):
        state = {name: TensorPart(pair[side]) for name, pair in pairs.items()}
        CheckpointFolder(tmp_path / str(side)).save(1, sections={"state": state}, run={})
    _, found = said(capsys, "diff", tmp_path / "0", tmp_path / "1", code=ExitCode.DIFFERENT)
    told = {each.pop("name"): each for each in found["tensors"]}
    assert told.keys() == pairs.keys() - {"same"}
    assert (told["nan"]["differing"], told["nan"]["largest"]) == (1, "NaN")
    assert (told["dtype"]["differing"], told["dtype"]["dtypes"]) == (0, ["float32", "float64"])
    assert (told["shape"]["shapes"], told["shape"]["numbers"]) == ([[3], [3, 1]], None)
    assert [told[name]["differing"] for name in ("whole", "truth", "complex")] == [1, 1, 1]


def test_every_checkpoint_of_a_folder_is_verified(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = said(capsys, "verify", run)
    assert [each["sound"] for each in found["checkpoints"]] == [True, True]
    (target,) = (run / "checkpoints" / "step-000000100").glob("*/state-00000.safetensors")
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    text, found = said(capsys, "verify", run, code=ExitCode.FINDINGS)
    assert [each["sound"] for each in found["checkpoints"]] == [False, True]
    assert str(target) in text
    (run / "checkpoints" / "step-000000200" / "manifest.json").write_bytes(b"")
    text, found = said(capsys, "verify", run, target.parents[1], code=ExitCode.FINDINGS)
    assert [each["sound"] for each in found["checkpoints"]] == [False] * 3
    assert "manifest.json" in text


def test_old_checkpoints_are_removed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "prune", str(run), "--keep-last", "1"]) == ExitCode.OK
    assert "steps 100" in capsys.readouterr().out
    _, found = said(capsys, "prune", run, "--keep-last", 1)
    assert (found["removed"], found["kept"]) == ([], [200])


@pytest.mark.parametrize("action", ["show", "verify", "prune --keep-last 1"])
def test_a_folder_without_checkpoints_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    name, *options = action.split()
    text, found = said(capsys, name, tmp_path, *options, code=ExitCode.USAGE)
    assert str(tmp_path) in text
    assert found["error"] == "CheckpointError"


def test_a_misspelled_action_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "shwo", "x"]) == ExitCode.USAGE
    assert "Did you mean 'show'?" in capsys.readouterr().err
