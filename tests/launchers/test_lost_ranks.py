"""A lost rank ends the run on every host within a stated time, by its name, and the launcher's job."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import fault_job
from cluster.external_launchers import EXTERNAL_LAUNCHERS, Started, mpirun_with
from cluster.slurm import MISSED_SECONDS
from cluster.two_hosts import TwoHostCluster, two_hosts
from helpers.waiting import wait_until

LIMIT_SECONDS = 15.0
"""From a loss until every rank that is left has its error."""
_SLACK_SECONDS = 10.0
"""For processes to end then: a busy machine's, and the launcher's own ending."""
_START_SECONDS = 90.0
_LONG_SECONDS = 60.0
_AT_ONCE = 3
_JOB = str(Path(fault_job.__file__))
_PAGE = Path(__file__).parents[2] / "docs" / "launching" / "mpi.md"
_ON_PAGE = re.findall(r"(--mca) (\w+) (\d+)", _PAGE.read_text(encoding="utf-8").split("```")[1])
_WATCHING = "watching mpirun"
_ENGINES = EXTERNAL_LAUNCHERS | {_WATCHING: mpirun_with(*itertools.chain.from_iterable(_ON_PAGE))}
"""Also `mpirun` that looks for lost hosts, and gives ranks time for a last word, as its page has it."""


def start(bed: TwoHostCluster, name: str, deed: str) -> Started:
    folder = bed.folder / f"{deed}-{name}-{time.monotonic_ns()}"
    folder.mkdir()
    started = _ENGINES[name].start(bed, [bed.python, _JOB, str(folder), deed], folder / "log")
    moment = folder / fault_job.MOMENT
    try:
        wait_until(moment.exists, _START_SECONDS, "it does not begin")
    except BaseException:
        started.end()
        raise AssertionError(started.log.read_text()) from None
    return started


def left(bed: TwoHostCluster) -> Iterator[str]:
    """Ranks that still run, on any host."""
    for host in (each for each in bed.network.hosts if not each.is_lost):
        for line in host.check(["ps", "-A", "-o", "args"]).splitlines():
            is_agent = "torch.distributed.run" in line
            if line.startswith(bed.python) and _JOB in line and not is_agent:
                yield f"{host.name}: {line}"


def unplug(bed: TwoHostCluster) -> None:
    bed.network.unplug(bed.network.hosts[1])


def put_down(bed: TwoHostCluster) -> None:
    bed.network.down(bed.network.hosts[1])


def lose(bed: TwoHostCluster) -> None:
    bed.network.hosts[1].lose()


def lose_first(bed: TwoHostCluster) -> None:
    """Loses the host of rank 0, on which the command was typed."""
    bed.first.lose()


def nothing(bed: TwoHostCluster) -> None:
    """The rank itself does something."""


@dataclass(frozen=True)
class Loss:
    """What happens to a run on hosts of its own.

    Attributes:
        launcher: Launcher that started the run.
        deed: Of rank 3.
        happens: From outside.
        named: What the run says of it.
        missed: Seconds after which the launcher itself misses a host, and does not wait for it any more.
    """

    launcher: str
    deed: str
    happens: Callable[[TwoHostCluster], None]
    named: str
    missed: float = 0.0


_WHERE = r" (at|after) step \d+, in call '\w"
_SILENT = r"rank [23] of 4 on node2 fell silent: nothing was received from it for 1[0-4] s" + _WHERE
_KILLED = "rank 3 of 4 on node2 is gone: its connection to rank 0 was closed" + _WHERE
_GONE = "rank [23] of 4 on node2 is gone: its connection to rank 0 was closed" + _WHERE
_IN_TIME = rf"in {fault_job.START_SECONDS:g} s \(timeouts.start\)"
_NEVER = rf"rank (\d, )*3 of 4 never came to port .*, {_IN_TIME}"
_BY_SLURM = 1.5 * MISSED_SECONDS
_BY_MPIRUN = 20.0
_FIRST = r"rank 0 is gone: its connection was closed\. It was" + _WHERE
LOSSES = {
    "killed-srun": Loss("srun", "kill", nothing, _KILLED),
    "killed-mpirun": Loss("mpirun", "kill", nothing, _KILLED),
    "killed-torchrun": Loss("torchrun", "kill", nothing, _KILLED),
    "killed-horovodrun": Loss("horovodrun", "kill", nothing, _KILLED),
    "suspended-srun": Loss("srun", "stop", nothing, _SILENT),
    "suspended-mpirun": Loss("mpirun", "stop", nothing, _SILENT),
    "absent-srun": Loss("srun", fault_job.ABSENT, nothing, _NEVER),
    "absent-mpirun": Loss("mpirun", fault_job.ABSENT, nothing, _NEVER),
    "absent-torchrun": Loss("torchrun", fault_job.ABSENT, nothing, _NEVER),
    "unplugged-srun": Loss("srun", "go_on", unplug, _SILENT, _BY_SLURM),
    "unplugged-mpirun": Loss(_WATCHING, "go_on", unplug, _SILENT, _BY_MPIRUN),
    "unplugged-torchrun": Loss("torchrun", "go_on", unplug, _SILENT),
    "link-down-srun": Loss("srun", "go_on", put_down, _SILENT, _BY_SLURM),
    "link-down-mpirun": Loss(_WATCHING, "go_on", put_down, _SILENT, _BY_MPIRUN),
    "link-down-torchrun": Loss("torchrun", "go_on", put_down, _SILENT),
    "host-lost-srun": Loss("srun", "go_on", lose, _GONE, _BY_SLURM),
    "host-lost-mpirun": Loss(_WATCHING, "go_on", lose, _GONE),
    "host-lost-torchrun": Loss("torchrun", "go_on", lose, _GONE),
    "first-lost-torchrun": Loss("torchrun", "go_on", lose_first, _FIRST),
    # What would show its words is lost too.
    "first-lost-mpirun": Loss(_WATCHING, "go_on", lose_first, ""),
}


@dataclass(frozen=True)
class End:
    """End of a run that has lost something.

    Attributes:
        errors: Seconds until each rank that is left had its error, by the clock that all hosts have.
        ranks: Seconds until no rank was left on any host.
        launcher: Seconds until what was typed on the first host, or on the one that is left, had ended.
        said: There, and by all ranks.
    """

    errors: Mapping[int, float]
    ranks: float
    launcher: float
    said: str


def errors_in(folder: Path, began: float) -> dict[int, float]:
    return {
        int(file.name.removeprefix(fault_job.ENDED)): file.stat().st_mtime - began
        for file in folder.glob(f"{fault_job.ENDED}*")
    }


def end_of(loss: Loss) -> End:
    with two_hosts() as bed:
        started = start(bed, loss.launcher, loss.deed)
        folder, began = started.log.parent, time.time()
        if loss.happens is nothing:
            began = (folder / fault_job.MOMENT).stat().st_mtime
        try:
            loss.happens(bed)
            wait_until(lambda: not [*left(bed)], _LONG_SECONDS, "ranks are left")
            ranks = time.time() - began
            typed = started.processes[-1 if bed.first.is_lost else 0]
            typed.wait(_LONG_SECONDS)
            launcher = time.time() - began
            return End(errors_in(folder, began), ranks, launcher, started.log.read_text())
        finally:
            started.end()


@pytest.fixture(scope="module")
def ends(bed: TwoHostCluster) -> Iterator[dict[str, Future[End]]]:
    """Several at once: they mostly wait."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield {name: pool.submit(end_of, loss) for name, loss in LOSSES.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_rank_ends_the_run_and_its_job(ends: dict[str, Future[End]], name: str) -> None:
    end = ends[name].result()
    assert re.search(LOSSES[name].named, end.said), end.said
    assert end.errors or not LOSSES[name].named
    assert max(end.errors.values(), default=0.0) < LIMIT_SECONDS, end.errors
    assert end.ranks < LIMIT_SECONDS + _SLACK_SECONDS
    assert end.launcher < LIMIT_SECONDS + _SLACK_SECONDS + LOSSES[name].missed
