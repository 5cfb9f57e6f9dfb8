"""A job of SLURM whose time runs out is started anew by SLURM, and ends as one that had all the time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cluster.bed import Bed, until

import isotrain

SPEC: dict[str, Any] = {
    "name": "long",
    "model": "integration.driven_job:model",
    "data": "integration.driven_job:Slow",
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
    "precision": "float64",
    "global_batch": 4,
    "epochs": 60,
    "plugins": ["isotrain.testing.reference"],
    "checkpoint": {"every_minutes": 60},
}
"""240 steps, of a minute at least: more than the job is given."""
SECONDS = 300.0
_OPTIONS = ("nodes=2", "tasks_per_node=2", "time=1", "requeue=5")


def submitted(bed: Bed, folder: Path) -> str:
    """The number of the job."""
    (folder / "spec.json").write_text(json.dumps(SPEC))
    run = ["isotrain", "run", str(folder / "spec.json"), "--backend", "reference"]
    asked = [part for option in _OPTIONS for part in ("--launcher-option", option)]
    where = ["--run-dir", str(folder / "run"), "--dry-run"]
    bed.first.check([*run, "--launcher", "slurm", *asked, *where], bed.slurm.variables)
    submit = ["sbatch", "--parsable", f"--output={folder / 'said'}"]
    return bed.first.check([*submit, f"{folder}/run/engine/job.sh"], bed.slurm.variables).strip()


def test_a_job_whose_time_runs_out_goes_on(bed: Bed) -> None:
    folder = bed.folder / "requeue"
    folder.mkdir()
    job = submitted(bed, folder)

    def state() -> str:
        return bed.first.check(["scontrol", "show", "job", job], bed.slurm.variables)

    until(lambda: re.search("JobState=(COMPLETED|FAILED|TIMEOUT)", state()), SECONDS, "no end")
    said = (folder / "said").read_text()
    assert "JobState=COMPLETED" in state(), said
    assert re.search(r"Restarts=[1-9]", state()), said
    assert '"event": "resumed"' in said, said
    found = isotrain.read_result(folder / "run" / "engine" / "start-1")
    local = {name: value for name, value in SPEC.items() if name != "checkpoint"}
    expected = isotrain.run(
        {**local, "data": "integration.driven_job:data"},
        backend="reference",
        run_directory=folder / "local",
        on_event=lambda event: None,
    )
    assert len(found.history.loss) == 240
    assert found.history.loss == pytest.approx(expected.history.loss, rel=1e-12)
