"""A run that Ray or Kubernetes was given ends here as it ended there, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import kubectl
from cluster.bed import Bed
from cluster.hosts import end
from integration import driven_job
from waiting import wait_until

from isotrain.core.cli.exit_codes import ExitCode

SECONDS = 90.0
SPEC = driven_job.SPEC | {"name": "driven"}
HOW = {
    "ray": ("ray", "workers=2", "placement=STRICT_SPREAD"),
    "job": ("kubernetes", "image=me/train:1", "pods=2"),
    "jobset": ("kubernetes", "image=me/train:1", "pods=2", "kind=jobset"),
}
"""Launchers and their options."""


def command(bed: Bed, folder: Path, how: str, **changes: Any) -> list[str]:
    """Has a run started."""
    assert how != "ray" or bed.ray
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps({**SPEC, **changes}))
    launcher, *options = HOW[how]
    run = ["isotrain", "run", str(folder / "spec.json"), "--backend", "reference"]
    asked = [part for option in options for part in ("--launcher-option", option)]
    return [*run, "--run-dir", str(folder / "run"), "--launcher", launcher, *asked]


def left(bed: Bed) -> Iterator[str]:
    """What still runs on any host, or is kept by the cluster."""
    for host in bed.network.hosts:
        yield from (
            line
            for line in host.check(["ps", "-A", "-o", "args"]).splitlines()
            if "-m isotrain run" in line
        )
    yield from bed.first.check(["find", "/run", "-path", f"{kubectl.STATE}/*"]).split()


@pytest.mark.parametrize("how", HOW)
def test_what_is_raised_there_is_raised_here(bed: Bed, how: str) -> None:
    folder = bed.folder / f"raised-{how}"
    data = "integration.driven_job:data_not_finite"
    done = bed.first.run(command(bed, folder, how, data=data))
    assert done.returncode == ExitCode.NOT_A_NUMBER, done.stdout
    assert "the loss of step 0 is NaN" in done.stdout
    assert not [*left(bed)]


@pytest.mark.parametrize("how", ["ray", "job"])
def test_an_interrupt_ends_the_ranks_everywhere(bed: Bed, how: str) -> None:
    folder = bed.folder / f"interrupted-{how}"
    slow = {"data": "integration.driven_job:Slow", "epochs": 1000}
    log = bed.folder / f"interrupted-{how}.log"
    started = bed.first.start(command(bed, folder, how, **slow), log)
    try:
        wait_until(lambda: "epoch 1/" in log.read_text() or started.poll(), SECONDS)
        assert [*left(bed)], log.read_text()
        (isotrain,) = psutil.Process(started.pid).children()
        isotrain.send_signal(signal.SIGINT)
        assert started.wait(SECONDS) == ExitCode.INTERRUPTED, log.read_text()
    finally:
        end(started)
    wait_until(lambda: not [*left(bed)], SECONDS)
