"""How a Job of Kubernetes is followed, by a `kubectl` that gives prepared answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
_KUBECTL = """#!/bin/sh
cd {folder}
echo "$1 $2" >> asked
case "$1 $2" in
"create "*) ;;
"get jobs") cat jobs ;;
"get pods")
    number=$(cat number)
    cat "pods-$number"
    [ ! -e "pods-$((number + 1))" ] || echo $((number + 1)) > number ;;
"logs --follow") echo one; [ ! -e again ] || echo two; touch again ;;
"logs "*) echo "the last of all pods" ;;
esac
"""
NOT_THERE = "0/3 nodes are available"


def pod(phase: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    status = {"phase": phase, "containerStatuses": [{"state": state}], **more}
    return {"items": [{"metadata": {"name": "digits-0-x"}, "status": status}]}


def followed(folder: Path, *pods: Any, failure: str = "") -> subprocess.CompletedProcess[str]:
    """What the program does where these are the answers about the first pod, one after the other."""
    conditions = [{"type": "Failed", "message": failure}] if failure else []
    (folder / "jobs").write_text(json.dumps({"items": [{"status": {"conditions": conditions}}]}))
    for number, each in enumerate(pods):
        (folder / f"pods-{number}").write_text(json.dumps(each))
    (folder / "number").write_text("0")
    kubectl = folder / "kubectl"
    kubectl.write_text(_KUBECTL.format(folder=folder))
    kubectl.chmod(0o755)
    program = (sys.executable, "-m", "isotrain.launchers.kubernetes_main")
    told = ("--kubectl", str(kubectl), "--manifest", "job.yaml", "--job", "digits")
    return subprocess.run([*program, *told], capture_output=True, text=True, check=False)


def test_pod_states_and_the_whole_log_are_shown_over_lost_connections(
    tmp_path: Path,
) -> None:
    unplaced = {"type": "PodScheduled", "status": "False", "message": NOT_THERE}
    pods = (
        {"items": []},
        pod("Pending", {}, conditions=[unplaced]),
        pod("Pending", {"waiting": {"reason": "ImagePullBackOff"}}),
        pod("Running", {"running": {}}),
        pod("Running", {"running": {}}),
        pod("Failed", {"terminated": {"exitCode": 7}}),
    )
    done = followed(tmp_path, *pods)
    assert done.returncode == 7, done.stderr
    waits = "the pod of rank 0 waits: "
    assert done.stdout == f"{waits}{NOT_THERE}\n{waits}ImagePullBackOff\none\ntwo\n"
    assert "the last of all pods" in done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert (asked[0], asked[-1]) == (
        "create --filename=job.yaml",
        "delete --filename=job.yaml",
    )


def test_a_job_that_fails_before_its_first_pod_runs_is_not_waited_for(tmp_path: Path) -> None:
    done = followed(tmp_path, {"items": []}, failure="a pod failed")
    assert done.returncode == 1
    assert "job digits has failed: a pod failed" in done.stderr
    assert "delete" in (tmp_path / "asked").read_text()
