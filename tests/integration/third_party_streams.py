"""Streams of torchdata and of Grain, which note the samples that they read in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SAMPLES, BATCH = 30, 5


class Noted:
    """Samples by their number, each reading of which is a line in a file."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        with self.file.open("a") as stream:
            stream.write(f"{number}\n")
        inputs = np.random.default_rng(number).standard_normal(4)
        return inputs, np.array(number % 3)


def of_torchdata(file: str, workers: int) -> Any:
    """Shuffled by a seed that torch draws."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from isotrain import sources

    loader = StatefulDataLoader(Noted(file), BATCH, shuffle=True, num_workers=workers)
    return sources.stream(loader, SAMPLES)


def of_grain(file: str, workers: int) -> Any:
    """Shuffled by Grain."""
    import grain

    from isotrain import sources

    samples = grain.MapDataset.source(Noted(file)).seed(3).shuffle()
    options = grain.ReadOptions(num_threads=workers)
    return sources.stream(samples.to_iter_dataset(options).batch(BATCH), SAMPLES)
