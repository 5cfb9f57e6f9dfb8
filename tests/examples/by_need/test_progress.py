"""A bar of one's own, drawn from the events of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import load

import isotrain


@pytest.mark.examples
def test_shows_a_line_for_each_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("progress")
    isotrain.run(
        example.spec.replace(threads=1),
        backend="torch-ddp",
        replicas=2,
        output=tmp_path / "run",
        on_event=example.show,
    )
    bars = [line.split("]")[0] for line in capsys.readouterr().out.splitlines() if line[:1] == "["]
    assert bars == ["[###......", "[######...", "[#########"]
