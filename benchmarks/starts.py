"""Time of N replicas to their first step, and memory of each, forked and fresh.

`python -m benchmarks.starts`: prints a table, the ways in alternation. Seconds are from the call of
`isotrain.launch` to the end of the first step in the slowest replica; "work" is the processor time that
a replica has taken by then, the mean of all; memory is the proportional set size (PSS, in which a page that
n processes share counts 1/n for each) of all processes of the run, its template included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

import isotrain
from benchmarks import workload
from isotrain.core.launching.forkserver.pool import FORK_SERVERS

WAYS = ("fresh", "cold", "warm")
"""Each by itself; forked from a template that starts with the run; forked from one that is there."""
_MIB = 1 << 20


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="torch-ddp,tf-multiworker")
    parser.add_argument("--replicas", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    counts = [int(count) for count in given.replicas.split(",")]
    for backend in given.backends.split(","):
        _report(backend, counts, given.repeats)


def _report(backend: str, counts: Sequence[int], repeats: int) -> None:
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for _ in range(repeats):
        for count in counts:
            for way in WAYS:
                found.setdefault((way, count), []).append(_measured(backend, count, way))
    print(f"{backend}\n{'':8}  replicas  first step  of one      work  PSS in all  per more")
    for way in WAYS:
        seconds, memory, work = (
            {n: statistics.median(figures[place] for figures in found[way, n]) for n in counts}
            for place in range(3)
        )
        first = counts[0]
        for n in counts:
            more = (memory[n] - memory[first]) / (n - first) if n > first else 0.0
            print(
                f"{way:8}{n:10}{seconds[n]:10.2f} s{seconds[n] / seconds[first]:8.2f}"
                f"{work[n]:8.2f} s{memory[n]:8.0f} MiB{more:6.0f} MiB",
                flush=True,
            )


def _measured(backend: str, replicas: int, way: str) -> tuple[float, float, float]:
    """Seconds to the first step, MiB after it, and a replica's processor time before."""
    os.environ["ISOTRAIN_START"] = "fresh" if way == "fresh" else "forked"
    with FORK_SERVERS.only_new(), TemporaryDirectory() as folder:
        if way == "warm":
            _launch(backend, replicas, Path(folder) / "before")
        began = time.monotonic()
        ranks = _launch(backend, replicas, Path(folder) / "run")
    ends, memory, work = zip(*ranks, strict=True)
    return max(ends) - began, memory[0], statistics.mean(work)


def _launch(backend: str, replicas: int, folder: Path) -> list[Any]:
    return isotrain.launch(
        _first_step,
        {**workload.spec("small", steps=2), "threads": 1},
        backend=backend,
        replicas=replicas,
        output=folder,
        on_event=lambda _: None,
    )


def _first_step(session: Any) -> tuple[float, float, float]:
    """End of the first step, memory of all processes of the run then, and this process's work."""
    for batch in session.batches():
        float(session.step(batch))
        break
    end, work = time.monotonic(), time.process_time()
    session.barrier()
    memory = _memory(session.replicas) if session.is_main else 0.0
    session.barrier()
    return end, memory, work


def _memory(replicas: int) -> float:
    """MiB of the processes of the run, and of their template, each page counted once."""
    own = psutil.Process()
    parent = own.parent()
    assert parent is not None
    family = [own, *(each for each in parent.children() if each.pid != own.pid)]
    if os.environ["ISOTRAIN_START"] == "forked":
        family.append(parent)
    assert len(family) >= replicas
    return sum(each.memory_full_info().pss for each in family) / _MIB


if __name__ == "__main__":
    main()
