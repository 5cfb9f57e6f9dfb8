"""A rank that is lost ends the run on every host within a stated time, by its name, and the engine's job."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import ending_job
from cluster.bed import Bed, until
from cluster.engines import ENGINES, Started

LIMIT_SECONDS = 15.0
_SLACK_SECONDS = 5.0  # a busy machine's, and the engine's own ending
_START_SECONDS = 90.0
_JOB = str(Path(ending_job.__file__))
STARTS = ("srun", "mpirun", "torchrun")


def start(bed: Bed, name: str, deed: str) -> Started:
    folder = bed.folder / f"{deed}-{name}-{time.monotonic_ns()}"
    folder.mkdir()
    started = ENGINES[name].start(bed, [bed.python, _JOB, str(folder), deed], folder / "log")
    moment = folder / "moment"
    try:
        until(moment.exists, _START_SECONDS, "it does not begin")
    except BaseException:
        started.end()
        raise AssertionError(started.log.read_text()) from None
    return started


def seconds_to_end(started: Started) -> float:
    began = time.monotonic()
    try:
        started.wait(LIMIT_SECONDS + _SLACK_SECONDS)
    finally:
        started.end()
    return time.monotonic() - began


def left(bed: Bed) -> Iterator[str]:
    """Ranks that still run, on any host."""
    for host in bed.network.hosts:
        for line in host.check(["ps", "-A", "-o", "args"]).splitlines():
            is_agent = "torch.distributed.run" in line
            if line.startswith(bed.python) and _JOB in line and not is_agent:
                yield f"{host.name}: {line}"


@pytest.mark.parametrize("name", STARTS)
def test_a_killed_rank_ends_the_job_and_is_named(bed: Bed, name: str) -> None:
    started = start(bed, name, "kill")
    assert seconds_to_end(started) < LIMIT_SECONDS + _SLACK_SECONDS
    said = started.log.read_text()
    assert "rank 3 of 4 on node2 is gone: its connection to rank 0 was closed" in said, said
    until(lambda: not [*left(bed)], LIMIT_SECONDS, "ranks are left")


@pytest.mark.parametrize("name", STARTS)
def test_an_unplugged_host_is_named_and_no_rank_is_left_on_either_side(bed: Bed, name: str) -> None:
    """The engines themselves may wait for it for ever."""
    started = start(bed, name, "go_on")
    host = bed.network.hosts[1]
    bed.network.unplug(host)
    try:
        until(lambda: not [*left(bed)], LIMIT_SECONDS + _SLACK_SECONDS, "ranks are left")
    finally:
        bed.network.plug(host)
        started.end()
        # SLURM keeps the hosts of a job whose srun was killed while it could not tell both
        bed.first.check(["scancel", "--user=root"], bed.slurm.variables)
    said = started.log.read_text()
    assert re.search(
        r"rank [23] of 4 on node2 fell silent: nothing was heard of it for 1\d s", said
    ), said
