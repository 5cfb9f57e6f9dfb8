"""A job of SLURM that is started anew, as its time is over or a node is gone, ends as it would have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster.two_hosts import TwoHostCluster
from helpers.waiting import wait_until
from integration import scheduler_job

import isotrain

SPEC = scheduler_job.SLOW | {
    "name": "long",
    "epochs": 45,
    "min_replicas": 2,
    "checkpoint": {"every_minutes": 60},
}
"""180 steps, of 45 s at least: SLURM ends a start 15 s before its minute is over, or up to 30 s earlier."""
SECONDS = 300.0
_OPTIONS = ("nodes=2", "tasks_per_node=2", "time=1", "requeue=15")
_ON_ONE_NODE = r"JobState=RUNNING .* Restarts=[1-9]\d* .*\bNodeList=node1\n"


def submitted(bed: TwoHostCluster, folder: Path) -> str:
    """The number of the job."""
    (folder / "spec.json").write_text(json.dumps(SPEC))
    run = ["isotrain", "run", str(folder / "spec.json"), "--backend", "reference"]
    asked = [part for option in _OPTIONS for part in ("--launcher-option", option)]
    where = ["--output", str(folder / "run"), "--dry-run"]
    bed.first.check([*run, "--launcher", "slurm", *asked, *where], bed.slurm.variables)
    submit = ["sbatch", "--parsable", f"--output={folder / 'said'}"]
    return bed.first.check([*submit, f"{folder}/run/launcher/job.sh"], bed.slurm.variables).strip()


def test_a_job_saves_on_a_signal_and_resumes_when_requeued(
    bed: TwoHostCluster,
) -> None:
    folder = bed.folder / "requeue"
    folder.mkdir()
    job = submitted(bed, folder)
    start = folder / "run" / "launcher" / "start-1"

    def has_saved() -> bool:
        return any(folder.glob("run/**/manifest.json"))

    def control(*what: str) -> str:
        return bed.first.check(["scontrol", *what], bed.slurm.variables)

    def state() -> str:
        return control("show", "job", job)

    def runs_on_one_node() -> bool:
        return re.search(_ON_ONE_NODE, state(), re.DOTALL) is not None

    wait_until((start / "steps.jsonl").exists, SECONDS, "it does not begin")
    assert not has_saved()
    bed.first.check(["scancel", "--signal=USR1", job], bed.slurm.variables)
    wait_until(has_saved, SECONDS, "no checkpoint was saved")
    # SLURM may have ended this start by itself meanwhile, whose minute goes by.
    wait_until(lambda: "JobState=RUNNING" in state(), SECONDS, "it does not go on")
    control("update", "NodeName=node2", "State=DRAIN", "Reason=test")
    try:
        control("requeue", job)
        wait_until(runs_on_one_node, SECONDS, "it waits for the other node")
    finally:
        control("update", "NodeName=node2", "State=RESUME")
    wait_until(lambda: re.search("JobState=(COMPLETED|FAILED|TIMEOUT)", state()), SECONDS, "no end")
    said = (folder / "said").read_text()
    assert "JobState=COMPLETED" in state(), said
    assert re.search(r"Restarts=[2-9]", state()), said
    assert said.count('"event": "resumed"') >= 2, said
    found = isotrain.read_result(start)
    local = {name: SPEC[name] for name in SPEC.keys() - {"checkpoint", "min_replicas"}}
    expected = isotrain.run(
        {**local, "data": "integration.scheduler_job:data"},
        backend="reference",
        output=folder / "local",
        on_event=lambda event: None,
    )
    assert len(found.history.loss) == 180
    assert found.history.loss == pytest.approx(expected.history.loss, rel=1e-12)
