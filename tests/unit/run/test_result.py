"""What is read back of a run is whole, or there is an error that says what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.core.errors import IsotrainError
from isotrain.core.launching.run_directory.run_directory import RESULT_FILE
from isotrain.core.results.result import FORMAT, RunResult, read_result

WHOLE = RunResult(
    0.5, 0.25, {"accuracy": 0.75}, {}, {}, False, {"train_s": 1.0}, {}, {}, [], Path("elsewhere")
).to_dict()
STEPS = {"event": "steps", "first": 0, "losses": [1.0, 0.5], "learning_rates": [0.25, 0.125]}


def left(folder: Path, result: Any = WHOLE) -> Path:
    """A run directory as a run of two steps leaves it."""
    (folder / RESULT_FILE).write_text(json.dumps(result))
    (folder / "steps.jsonl").write_text(json.dumps(STEPS) + "\n")
    (folder / "events.jsonl").touch()
    return folder


def test_the_files_of_a_run_are_read(tmp_path: Path) -> None:
    found = read_result(left(tmp_path))
    assert found.run_directory == tmp_path
    assert found.history.loss == [1.0, 0.5]


def test_skipped_steps_move_no_others(tmp_path: Path) -> None:
    found = read_result(left(tmp_path))
    with (tmp_path / "steps.jsonl").open("a") as steps:
        steps.write(json.dumps(STEPS | {"first": 4}) + "\n")
    np.testing.assert_array_equal(found.history.loss, [1.0, 0.5, np.nan, np.nan, 1.0, 0.5])
    assert len(found.history.learning_rate) == 6


def test_logged_scalars_are_read_by_name_and_step(tmp_path: Path) -> None:
    scalars = {
        "event": "scalars",
        "steps": [0, 1],
        "values": [{"kl": "NaN"}, {"kl": 2, "norm": 3.0}],
    }
    again = {"event": "scalars", "steps": [0], "values": [{"kl": 1.0}]}
    found = read_result(left(tmp_path))
    with (tmp_path / "steps.jsonl").open("a") as steps:
        steps.writelines(json.dumps(each) + "\n" for each in (scalars, again))
    assert found.history.scalars == {"kl": {0: 1.0, 1: 2.0}, "norm": {1: 3.0}}
    assert found.history.loss == [1.0, 0.5]


@pytest.mark.parametrize("name", ["steps.jsonl", "events.jsonl"])
def test_a_missing_history_file_is_an_error(tmp_path: Path, name: str) -> None:
    found = read_result(left(tmp_path))
    (tmp_path / name).unlink()
    with pytest.raises(IsotrainError, match=rf"{name} is missing.*read_result"):
        _ = found.history


@pytest.mark.parametrize(
    ("result", "received"), [(WHOLE | {"format": FORMAT + 1}, f"{FORMAT + 1}"), ([], "None")]
)
def test_another_format_is_refused(tmp_path: Path, result: Any, received: str) -> None:
    with pytest.raises(
        IsotrainError, match=rf"result\.json: expected .* {FORMAT}, received {received}"
    ):
        read_result(left(tmp_path, result))


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "format"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    result = {key: value for key, value in WHOLE.items() if key != name}
    with pytest.raises(IsotrainError, match=rf"result\.json: .*{name}"):
        read_result(left(tmp_path, result))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"final_loss": []}, "final_loss: expected a number"),
        ({"final_loss": 10**400}, "final_loss: a number of 401 digits"),
        ({"metrics": {"accuracy": "high"}}, "metrics.accuracy: expected a number"),
        ({"timings": None}, "timings: expected an object"),
        ({"versions": {"torch": 2}}, "versions.torch: expected text"),
        ({"more": 1}, "it has more"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(IsotrainError, match=rf"result\.json: {field}"):
        read_result(left(tmp_path, WHOLE | changes))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\udcff", ""])
def test_invalid_json_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    left(tmp_path)
    (tmp_path / RESULT_FILE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(IsotrainError, match=r"result\.json cannot be read"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    "line", ["{", "[]", "[" * 100_000, '{"event": "steps"}', json.dumps(STEPS | {"losses": [{}]})]
)
def test_a_broken_line_of_a_history_is_named(tmp_path: Path, line: str) -> None:
    found = read_result(left(tmp_path))
    (tmp_path / "steps.jsonl").write_text(json.dumps(STEPS) + "\n" + line + "\n")
    with pytest.raises(IsotrainError, match=r"steps\.jsonl(, line 2: this is no event|: losses)"):
        _ = found.history
