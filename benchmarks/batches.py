"""Cost of a batch, from where the samples lie to tensors, beside reading them by hand.

`python -m benchmarks.batches [--rounds N] [KIND ...]`: each kind of data is read by a program that does no
more, and by one whose session does; both each by itself, in turn. Printed are medians of the processor
microseconds per batch (64 samples of 64 features), of all threads, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import isotrain
from benchmarks.statistics import median

BATCH, FEATURES, SAMPLES = 64, 64, 64 * 256
EPOCHS = 6
"""Epochs that are read; the first is not counted."""

Epochs = Callable[[], Iterable[Any]]
"""Function that returns the batches of one epoch."""


@functools.cache
def samples() -> tuple[np.ndarray, np.ndarray]:
    """Inputs, float32 (SAMPLES, FEATURES), and targets, float32 (SAMPLES, 1)."""
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    return inputs, inputs[:, :1].copy()


def _indexed(shuffled: bool) -> Epochs:
    import torch

    arrays, generator = samples(), np.random.default_rng(0)

    def epoch() -> Iterator[Any]:
        order = generator.permutation(SAMPLES) if shuffled else None
        for start in range(0, SAMPLES, BATCH):
            own = slice(start, start + BATCH)
            rows = own if order is None else order[own]
            yield [torch.from_numpy(array[rows]) for array in arrays]

    return epoch


def arrays_in_order() -> Epochs:
    """NumPy arrays, by slices."""
    return _indexed(shuffled=False)


def arrays_shuffled() -> Epochs:
    """NumPy arrays, by the positions of an epoch's own order."""
    return _indexed(shuffled=True)


def tensor_loader() -> Any:
    """torch's `DataLoader` over a `TensorDataset`."""
    import torch.utils.data as torch_data

    tensors = [torch_data.default_convert(array) for array in samples()]
    return torch_data.DataLoader(torch_data.TensorDataset(*tensors), BATCH, shuffle=True)


class OneByOne:
    """A data set that is asked for each sample."""

    def __init__(self) -> None:
        self.arrays = samples()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """One sample: inputs of shape `[FEATURES]`, target of shape `[1]`."""
        inputs, targets = self.arrays
        return inputs[index], targets[index]


def sample_loader() -> Any:
    """torch's `DataLoader` over a data set of one's own."""
    import torch.utils.data as torch_data

    return torch_data.DataLoader(OneByOne(), BATCH, shuffle=True)


def generator() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A generator of batches `[BATCH, ...]`; by hand they become tensors too."""
    inputs, targets = samples()
    for start in range(0, SAMPLES, BATCH):
        yield inputs[start : start + BATCH], targets[start : start + BATCH]


def generated() -> Epochs:
    import torch

    def epoch() -> Iterator[Any]:
        for batch in generator():
            yield [torch.from_numpy(array) for array in batch]

    return epoch


def tf_dataset() -> Any:
    """A `tf.data.Dataset` of batches."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(samples()).batch(BATCH)


@dataclass(frozen=True)
class Kind:
    """Kind of data set: one way in which samples are given.

    Attributes:
        backend: Backend whose tensors a session makes of them.
        by_hand: Function that returns an object, which gives an epoch when it is called or iterated over.
        data: Data function of the spec.
        shuffle: Whether the spec shuffles.
    """

    backend: str
    by_hand: Callable[[], Any]
    data: Callable[..., Any]
    shuffle: bool = True


KINDS = {
    "arrays, in order": Kind("torch-ddp", arrays_in_order, samples, shuffle=False),
    "arrays, shuffled": Kind("torch-ddp", arrays_shuffled, samples),
    "DataLoader over tensors": Kind("torch-ddp", tensor_loader, tensor_loader),
    "DataLoader over samples": Kind("torch-ddp", sample_loader, sample_loader),
    "generator": Kind("torch-ddp", generated, generator, shuffle=False),
    "tf.data": Kind("tf-mirrored", tf_dataset, tf_dataset, shuffle=False),
}


def torch_model() -> Any:
    import torch

    return torch.nn.Linear(FEATURES, 1)


def tf_model() -> Any:
    import keras

    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])


def read_by_hand(kind: Kind) -> float:
    """Processor seconds of all epochs but the first."""
    given = kind.by_hand()
    for epoch in range(EPOCHS):
        if epoch == 1:
            start = time.process_time()
        for _ in given() if callable(given) else given:
            pass
    return time.process_time() - start


def read_by_session(kind: Kind) -> float:
    """The same."""
    spec = isotrain.TrainingSpec(
        name="batches",
        model={"torch": torch_model, "tensorflow": tf_model},
        data=kind.data,
        loss="mean_squared_error",
        optimizer={"name": "sgd", "lr": 0.1},
        global_batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=kind.shuffle,
        threads=1,
        device="cpu",
    )
    with isotrain.open_session(spec, backend=kind.backend) as session:
        for batch in session.batches():
            if batch.step == SAMPLES // BATCH:
                start = time.process_time()
        return time.process_time() - start


SIDES = {"by hand": read_by_hand, "by a session": read_by_session}


def measured(name: str, side: str) -> float:
    """Microseconds per batch, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.batches", name, "--side", side]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds: float = json.loads(done.stdout.splitlines()[-1])
    return seconds / (SAMPLES // BATCH * (EPOCHS - 1)) * 1e6


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", nargs="*", help=", ".join(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.kind) - set(KINDS):
        parser.error(f"there is no {', '.join(sorted(unknown))}. Available: {', '.join(KINDS)}")
    if given.side is not None:
        print(SIDES[given.side](KINDS[given.kind[0]]))
        return
    for name in given.kind or KINDS:
        found = {
            side: np.array(values)
            for side, values in zip(
                SIDES,
                np.array([[measured(name, side) for side in SIDES] for _ in range(given.rounds)]).T,
                strict=True,
            )
        }
        texts = [f"{side} {median(values).text(digits=0)} µs" for side, values in found.items()]
        print(f"{name}: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
