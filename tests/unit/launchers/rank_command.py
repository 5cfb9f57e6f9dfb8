"""The command of a rank that launchers get in these tests, and recorded environments."""

from __future__ import annotations

import json
from pathlib import Path

from isotrain.plugin import RankCommand

KEY = "0123456789abcdef"
COMMAND = RankCommand(
    name="isotrain-digits",
    spec=Path("/shared/a run/launcher/spec.json"),
    spec_text='{"model": "m:build"}',
    options=("--backend", "torch-ddp:gloo", "--json"),
    run_directory=Path("/shared/a run/launcher/rank-0"),
    variables={"PYTHONPATH": "/my code"},
    key=KEY,
)
RECORDED = Path(__file__).parents[2] / "launchers" / "recorded"


def recorded(name: str) -> dict[str, str]:
    variables: dict[str, str] = json.loads((RECORDED / f"{name}.json").read_text())[0]["variables"]
    return variables
