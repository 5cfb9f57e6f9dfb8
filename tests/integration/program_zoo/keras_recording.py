"""Records the programs of Keras of one number of processes, one after the other.

python -m integration.program_zoo.keras_recording FOLDER SEEDS
horovodrun -np 2 python -m integration.program_zoo.keras_recording FOLDER SEEDS
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import horovod.tensorflow as hvd
from integration.program_zoo.keras_programs import KERAS_CLEAN, KERAS_PROGRAMS, Program, clean

from isotrain.adapters.tensorflow import program_hooks
from isotrain.analysis.program_trace.recorder import Recorder


def recorded(folder: Path, train: Program, wrong: bool) -> None:
    """Runs a program; the hooks of those before record nothing more."""
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder, steps=10)
    program_hooks.install(recorder)
    train(hvd.rank(), hvd.size(), wrong)
    recorder.end()
    recorder.steps = 0
    recorder.is_recording = False


def main(folder: Path, seeds: int) -> None:
    hvd.init()
    for name, entry in KERAS_PROGRAMS.items():
        for variant, processes in (("right", entry.right), ("wrong", entry.wrong)):
            if processes == hvd.size():
                recorded(folder / f"keras-{name}-{variant}", entry.train, variant == "wrong")
    for name, seed in itertools.product(KERAS_CLEAN, range(seeds)):

        def train(rank: int, world: int, _: bool, name: str = name, seed: int = seed) -> None:
            clean(name, seed, rank, world)

        recorded(folder / f"keras-{name}-{seed}-{hvd.size()}", train, wrong=False)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(Path(sys.argv[1]), int(sys.argv[2]))
