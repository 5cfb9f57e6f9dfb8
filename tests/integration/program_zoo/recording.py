"""Records programs of the zoo in forks: `python -m integration.program_zoo.recording FOLDER SEEDS`."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from integration.program_zoo.programs import CLEAN, PROGRAMS, clean

from isotrain.adapters.torch import program_hooks
from isotrain.analysis.program_trace.recorder import Recorder


def recorded(
    folder: Path, processes: int, train: Callable[[int, int], None], threads: int = 1
) -> None:
    """Runs a program in forks of this process, each of which writes its trace."""
    folder.mkdir(parents=True)
    children = [_forked(folder, rank, processes, train, threads) for rank in range(processes)]
    assert not any(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children), folder


def _forked(
    folder: Path, rank: int, processes: int, train: Callable[[int, int], None], threads: int
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(threads)
        if processes > 1:
            store = dist.FileStore(str(folder / "store"), processes)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
        recorder = Recorder(folder, steps=10)
        program_hooks.install(recorder)
        train(rank, processes)
        recorder.end()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(folder: Path, seeds: int) -> None:
    """Records every program, right and wrong; and those without a fault, three times for each seed."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports what would be imported in every fork
    for name, entry in PROGRAMS.items():
        for variant, processes in (("right", entry.right), ("wrong", entry.wrong)):
            recorded(
                folder / f"{name}-{variant}",
                processes,
                lambda rank, world, e=entry, v=variant: e.train(rank, world, v == "wrong"),
            )
    for name, seed in itertools.product(CLEAN, range(seeds)):
        train = functools.partial(clean, name, seed)
        recorded(folder / f"{name}-{seed}", 1, train)
        recorded(folder / f"{name}-{seed}-threads", 1, train, threads=2)
        recorded(folder / f"{name}-{seed}-processes", 2, train)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
