"""`profile` of the spec: which steps and ranks are traced, and where it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from integration.session_specs import launch

import isotrain
from isotrain.analysis.run_report.html import render
from isotrain.analysis.run_report.profile import profile_table
from isotrain.analysis.run_report.run_files import RunFiles
from isotrain.core.errors import RunFailedError
from isotrain.plugin import ActionTimingGroup

pytestmark = [pytest.mark.usefixtures("reference"), pytest.mark.slow]


def training(session: isotrain.Session) -> None:
    for batch in session.batches():
        session.step(batch)


@pytest.mark.parametrize(("first", "steps", "expected"), [(2, 3, 3), (7, 10, 2)])
def test_steps_of_rank_0_are_traced(tmp_path: Path, first: int, steps: int, expected: int) -> None:
    """The run has 9 steps: the profiler ends with it."""
    launch(training, tmp_path, 2, "torch-ddp", profile={"first_step": first, "steps": steps})
    (folder,) = (tmp_path / "run" / "profile").iterdir()
    assert folder.name == "rank-0"
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [each.get("name", "") for each in events]
    assert sum("c10d::allreduce_" in name for name in names) >= expected
    assert "Self CPU" in (folder / "summary.txt").read_text()


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_profiled_steps_have_a_time_line(tmp_path: Path, backend: str) -> None:
    launch(training, tmp_path, 2, backend, profile={"first_step": 2, "steps": 3})
    page = json.loads((tmp_path / "run" / "profile" / "rank-0" / "steps.json").read_text())
    spans = [each for each in page["traceEvents"] if each["ph"] == "X"]
    actions = ["forward", "backward", "exposed exchange", "update"]
    assert [each["name"] for each in spans] == [
        name for step in (2, 3, 4) for name in (f"step {step}", *actions)
    ]
    whole, *parts = spans[:5]
    assert all(whole["ts"] <= each["ts"] for each in parts)
    end = parts[-1]["ts"] + parts[-1]["dur"]
    assert end == pytest.approx(whole["ts"] + whole["dur"])


def test_the_page_has_one_table_of_all_ranks(tmp_path: Path) -> None:
    profile = {"first_step": 2, "steps": 3, "all_processes": True}
    launch(training, tmp_path, 2, "torch-ddp", profile=profile)
    folder = tmp_path / "run"
    columns, rows = profile_table(folder)
    parts = ["step", "forward", "backward", "exposed exchange", "update"]
    assert columns == ("rank", "steps", *(f"{part}, ms" for part in parts))
    assert [row[:2] for row in rows] == [("0", "3"), ("1", "3")]
    page = json.loads((folder / "profile" / "rank-1" / "steps.json").read_text())
    spans = [each for each in page["traceEvents"] if each["ph"] == "X"]
    for part, text in zip(parts, rows[1][2:], strict=True):
        took = [each["dur"] for each in spans if each["name"].startswith(part)]
        assert float(text) == pytest.approx(sum(took) / 3 / 1e3, abs=1e-3)
    html = render(RunFiles(folder))
    assert f"<td>{rows[1][2]}</td>" in html


def ends_of_actions(session: isotrain.Session) -> list[list[float]]:
    """Ends of the actions that the group reports after each step."""
    assert isinstance(session.group, ActionTimingGroup)
    ends = []
    for batch in session.batches():
        session.step(batch)
        ends.append([each.end for each in session.group.last_actions()])
    return ends


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_only_profiled_steps_are_timed(tmp_path: Path, backend: str) -> None:
    """A timed step of TensorFlow sends nothing before its last gradient is computed; step 1 traces it."""
    profile = {"first_step": 2, "steps": 3}
    ends = launch(ends_of_actions, tmp_path, 2, backend, profile=profile)
    assert [bool(each) for each in ends] == [False] + [True] * 8
    assert len({tuple(each) for each in ends[1:5]}) == 4
    assert ends[5:] == [ends[4]] * 4


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"first_step": 9}, r"profile\.first_step: 9: the run has 9 steps"),
        ({"first_step": 1}, "start_profile"),
    ],
)
def test_what_cannot_be_profiled_is_refused(tmp_path: Path, profile: Any, message: str) -> None:
    with pytest.raises(RunFailedError, match=message):
        launch(training, tmp_path, profile=profile)
