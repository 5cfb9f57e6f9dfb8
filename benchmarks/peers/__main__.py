"""isotrain beside what people would run instead, each as a program of its own.

    python -m benchmarks.peers --setup                 # once: the environment of the peers
    python -m benchmarks.peers                         # everything: hours
    python -m benchmarks.peers --goals                 # what the goals are about, and which are reached
    python -m benchmarks.peers --workload mlp-64 --contender 'torch-ddp*' --contender 'isotrain/torch-ddp/*'
    python -m benchmarks.peers --markdown peers.md --json peers.json

Contenders train the same samples in the same order from the same weights, and it is an error when their
losses do not agree. Each run is a program started as its documentation says; all runs of a round take place
in a new random order. Reported are medians over the rounds with 95 % bootstrap intervals; a ratio is
taken within each round, to the program by hand without a loader. Ctrl-C ends the measurement with the
rounds that are whole.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.peers import environment, goals, machine, table
from benchmarks.peers.contenders import CONTENDERS, PEERS, Contender
from benchmarks.peers.job import CLOCKS
from benchmarks.peers.rounds import measure
from benchmarks.peers.run import Cell, ContenderError
from benchmarks.peers.workloads import WORKLOADS


def main() -> int:
    """Measures what was asked for; 1 when a contender failed or trained something else."""
    given = _options()
    if given.setup:
        environment.make()
        return 0
    if given.list:
        print("\n".join(contender.name for contender in CONTENDERS))
        return 0
    try:
        _measure(given)
    except (ContenderError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", action="store_true", help="make the environment of the peers")
    parser.add_argument("--list", action="store_true", help="print the contenders")
    parser.add_argument("--contender", action="append", help="a name or a pattern; repeatable")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS))
    parser.add_argument("--replicas", default="1,2", help="such as 1,2")
    parser.add_argument("--threads", help="per replica, such as 1,2; default: the cores shared out")
    parser.add_argument(
        "--goals",
        action="store_true",
        help="of all this only what a goal is about, with 1 and 2 threads, and say which are reached",
    )
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="time the steps by the seconds that pass, or by those of the processor, which count no"
        " waiting and which other programs disturb less",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=10,
        help="timed runs of each contender; 0: only see that each runs, and that the losses agree",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of the runs")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write the rows there")
    return parser.parse_args()


def _measure(given: argparse.Namespace) -> None:
    cells = _cells(given)
    if any(cell.contender.name in PEERS for cell in cells):
        environment.require()
    facts = machine.described(given.seed) | {"clock of the steps": given.clock}
    first, timed = measure(
        cells, given.rounds, given.seed, lambda line: print(line, file=sys.stderr, flush=True)
    )
    if not given.rounds:
        print(f"All {len(cells)} train the same.")
        return
    facts["rounds"] = str(len(next(iter(timed.values()))))
    found = table.rows(first, timed)
    text = table.markdown(found, facts)
    if given.goals:
        text += f"\n{goals.summary(found)}\n{goals.exchange()}"
    print(text)
    if given.markdown:
        given.markdown.write_text(text, encoding="utf-8")
    if given.json:
        records = {"machine": facts, "rows": [row.record() for row in found]}
        given.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def _cells(given: argparse.Namespace) -> list[Cell]:
    cells = [
        Cell(contender, workload, replicas, threads, given.clock)
        for workload in given.workload or WORKLOADS
        for replicas in map(int, given.replicas.split(","))
        for threads in _threads(given, replicas)
        for contender in _chosen(given.contender or ["*"])
        if contender.name in (WORKLOADS[workload].contenders or [contender.name])
    ]
    return [cell for cell in cells if goals.is_about(cell)] if given.goals else cells


def _chosen(patterns: list[str]) -> list[Contender]:
    chosen = [c for c in CONTENDERS if any(fnmatch(c.name, pattern) for pattern in patterns)]
    if not chosen:
        names = ", ".join(contender.name for contender in CONTENDERS)
        raise ContenderError(f"--contender: none is called {patterns}. Available: {names}.")
    return chosen


def _threads(given: argparse.Namespace, replicas: int) -> list[int]:
    """Numbers of threads: as requested, else those of the goals, or an equal share of the cores."""
    if given.threads:
        return [int(number) for number in given.threads.split(",")]
    return [1, 2] if given.goals else [max(1, len(os.sched_getaffinity(0)) // replicas)]


if __name__ == "__main__":
    sys.exit(main())
