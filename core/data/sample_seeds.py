"""Seeds of the global random generators while samples are fetched: the same in any process.

So a data set that draws from `random`, `numpy.random` or torch's default generator gives the same samples
with any number of workers and, where it makes them one by one, with any number of replicas.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np

from isotrain.core.data.sample_rng import SampleRandom

if TYPE_CHECKING:
    from isotrain.core.data.sampler import Indices

_SEEDS = 1 << 32


class SampleSeeds:
    """Seeds the global generators of this process for each sample of a local batch.

    Attributes:
        by_row: Seed of each row of the batch that is being made.
        position: Index in the data set of the sample that is being made; None for all of the batch.
    """

    def __init__(self, seed: int, epoch: int, positions: Indices) -> None:
        """Prepares the seeds of samples by their positions in the order, int64 [batch], in an epoch."""
        random_numbers = SampleRandom(seed, epoch, positions)
        self.by_row: list[int] = random_numbers.integers(0, _SEEDS).tolist()
        self.position: int | None = None

    def one_by_one(self, indices: Sequence[int]) -> Iterator[int]:
        """Each index of a batch in the data set, with the generators seeded for it."""
        for seed, position in zip(self.by_row, indices, strict=True):
            _seed_generators(seed)
            self.position = position
            yield position
        self.for_batch()

    def for_batch(self) -> None:
        """Seeds the generators for what makes all of a batch at once, by its first sample."""
        self.position = None
        _seed_generators(self.by_row[0] ^ 1)


CURRENT: ContextVar[SampleSeeds | None] = ContextVar("sample_seeds", default=None)
"""Seeds of the local batch that is being made; None where the generators are left alone."""


@contextlib.contextmanager
def seeded(seeds: SampleSeeds) -> Iterator[SampleSeeds]:
    """Context in which the samples of a batch are made with these seeds."""
    token = CURRENT.set(seeds)
    try:
        seeds.for_batch()
        yield seeds
    finally:
        CURRENT.reset(token)


@contextlib.contextmanager
def only_rows(rows: Iterable[int]) -> Iterator[None]:
    """Context in which a source makes only some rows of a batch, for one that wraps it."""
    seeds = CURRENT.get()
    if seeds is None:
        yield
        return
    batch = seeds.by_row
    seeds.by_row = [batch[row] for row in rows]
    try:
        yield
    finally:
        seeds.by_row = batch


@contextlib.contextmanager
def preserved_global_rng() -> Iterator[None]:
    """Restores the global generators of Python, NumPy and torch at the end of the block."""
    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)


def _seed_generators(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and, if it is imported, torch on the CPU."""
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)
