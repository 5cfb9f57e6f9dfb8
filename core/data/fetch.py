"""Fetching: the host arrays of a local batch, gathered from a source, transformed and checked."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.core.data.arrays import InputsAndTargets, as_array
from isotrain.core.data.order.permutation import random_of
from isotrain.core.data.pytree import Weighted, leaves, map_parts, map_tree, unweighted
from isotrain.core.data.sample_rng import SampleRandom
from isotrain.core.data.sample_seeds import SampleSeeds, preserved_global_rng, seeded
from isotrain.core.data.sources import Source
from isotrain.core.data.streaming.rebatch import IsOnDevice, fingerprint, never_on_device
from isotrain.core.data.transform_check import require_no_mixing
from isotrain.core.errors import DataError
from isotrain.core.quantities import counted

if TYPE_CHECKING:
    from isotrain.core.data.sampler import Indices

Transform = Callable[[Any, Any, SampleRandom], InputsAndTargets]
"""`transform(inputs, targets, random)`: a local batch to a local batch, sample by sample."""
Gather = Callable[["Indices"], InputsAndTargets]
_UNSEEDED = (
    "data: sample {} was made twice from the same seeds, and differs: the data set draws from a generator"
    " that isotrain does not seed, such as TensorFlow's, Keras' or one of its own, so its samples depend on"
    " `loader.workers` and on where a run resumes. Draw from `random`, `numpy.random` or torch's default"
    " generator, or take a seed from them: tf.random.stateless_uniform(shape, [random.getrandbits(31), 0])."
)


@dataclass(frozen=True, slots=True)
class BatchPositions:
    """Positions of a local batch's samples in the data set, and of its global batch.

    Attributes:
        epoch: Index of the epoch, from 0.
        step: Index of the global batch in the run, from 0.
        local: Positions of the local batch's samples in the data set, int64 [samples].
        all: Positions of the global batch's samples, int64 [size].
    """

    epoch: int
    step: int
    local: Indices
    all: Indices


class TransformedBatches:
    """Applies the spec's transform to local batches, and checks their rows.

    Attributes:
        checks_transform: Whether to check, on the next local batch, that the transform does not mix samples.
    """

    def __init__(
        self,
        transform: Transform | None,
        seed: int,
        *,
        checks_transform: bool = False,
        is_on_device: IsOnDevice = never_on_device,
    ) -> None:
        """Keeps the transform.

        Args:
            transform: `transform(inputs, targets, random) -> (inputs, targets)` of a local batch, each
                sample independently; it may change arrays in place but not the number of samples.
            seed: Seed of the transform's random numbers.
            checks_transform: Whether to check, on the first local batch, that it does not mix samples.
            is_on_device: Whether a leaf is on the device already, and stays as it is.
        """
        self.checks_transform = checks_transform
        self._transform = transform
        self._seed = seed
        self._is_on_device = is_on_device

    @property
    def is_given(self) -> bool:
        """Whether there is a transform."""
        return self._transform is not None

    def on_host(self) -> TransformedBatches:
        """The same for another process, where all leaves become arrays."""
        return TransformedBatches(self._transform, self._seed)

    def takes_check(self, rows: int) -> bool:
        """Whether the transform is to be checked on a local batch of so many samples; then not again."""
        takes_it = self.checks_transform and rows > 1
        self.checks_transform = self.checks_transform and not takes_it
        return takes_it

    def __call__(
        self,
        parts: InputsAndTargets,
        positions: BatchPositions,
        gather: Gather | None = None,
    ) -> InputsAndTargets:
        """The local batch as arrays `[batch, ...]`, with a row for each of its positions.

        Args:
            parts: The samples of the local batch, arrays `[batch, ...]`.
            positions: Their positions.
            gather: Function from rows of the global batch to copies of their samples; None where it has only
                the local batch.
        """
        made_by = "the data set"
        if self._transform is not None:
            parts = self._apply(self._transform, parts, positions, gather)
            made_by = "the transform"
        inputs, targets = parts[0], parts[1]
        rows = len(positions.local)
        return self._check_rows(inputs, rows, "inputs", made_by), (
            None if targets is None else self._check_rows(targets, rows, "targets", made_by)
        )

    def _apply(
        self,
        transform: Transform,
        parts: InputsAndTargets,
        positions: BatchPositions,
        gather: Gather | None,
    ) -> InputsAndTargets:
        """Calls the transform, without sample weights, on arrays of shape [batch, ...]."""
        targets, weights = unweighted(parts[1])
        rows = len(positions.local)
        numbers_of = partial(self._random_of, positions, gather)
        if self.takes_check(rows):
            require_no_mixing(transform, (parts[0], targets), numbers_of)
        result = transform(parts[0], targets, numbers_of(0, rows))
        if not isinstance(result, tuple) or len(result) != 2:
            raise DataError(
                f"transform: expected it to return (inputs, targets), received {result!r:.80}."
            )
        return result if weights is None else (result[0], Weighted(result[1], weights))

    def _random_of(
        self, positions: BatchPositions, gather: Gather | None, start: int, stop: int
    ) -> SampleRandom:
        """Random numbers of the samples `start` to `stop` of a local batch."""
        local, seed, epoch = positions.local[start:stop], self._seed, positions.epoch

        def partners(number: int) -> tuple[Any, Any, SampleRandom]:
            assert gather is not None
            first = int(np.flatnonzero(positions.all == local[0])[0])
            rows = _partner_rows(positions, seed, number)[first : first + len(local)]
            inputs, targets = gather(rows)
            return inputs, unweighted(targets)[0], SampleRandom(seed, epoch, positions.all[rows])

        return SampleRandom(seed, epoch, local, None if gather is None else partners)

    def _check_rows(self, tree: Any, expected: int, name: str, made_by: str) -> Any:
        """Every leaf as an array with `expected` rows; unchanged if it is on the device."""
        tree = map_tree(
            lambda leaf: (
                leaf if self._is_on_device(leaf) else as_array(leaf, f"{made_by}'s {name}")
            ),
            tree,
        )
        for path, array in leaves(tree, name):
            if array.ndim == 0 or len(array) != expected:
                raise DataError(
                    f"{path}: {made_by} gave shape {array.shape}, expected {counted(expected, 'row')}"
                    " (samples)."
                )
        return tree


def _on_host(parts: InputsAndTargets) -> InputsAndTargets:
    """The parts with empty arrays in the place of tensors on a device."""
    return map_parts(lambda leaf: leaf if isinstance(leaf, np.ndarray) else np.empty(0), parts)


def _partner_rows(positions: BatchPositions, seed: int, number: int) -> Indices:
    """The partner of each row of a global batch: the next one in a random cycle through all, int64 [size]."""
    random = random_of(seed, positions.epoch, 3, positions.step, number)
    cycle = random.permutation(len(positions.all))
    rows = np.empty_like(cycle)
    rows[cycle] = np.roll(cycle, -1)
    return rows


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Makes local batches of a source's samples; picklable where the source and the transform are.

    Attributes:
        source: The source.
        transform: The spec's transform, and the check of rows.
        seed: Seed from which the global random generators are seeded for each sample; None: they are not.
        restores_generators: Whether these then are as they were before.
    """

    source: Source
    transform: TransformedBatches
    seed: int | None = None
    restores_generators: bool = True

    def fetch(self, positions: BatchPositions) -> InputsAndTargets:
        """The samples of a local batch: host arrays `[batch, ...]`, gathered, transformed and checked."""
        if self.seed is None:
            return self._fetch(positions, self.source.gather)
        had_torch = "torch" in sys.modules
        gather = partial(self._gather_seeded, self.seed, positions.epoch)
        with preserved_global_rng() if self.restores_generators else nullcontext():
            parts = self._fetch(positions, gather)
            if had_torch or "torch" not in sys.modules:
                return parts
            return self._fetch(positions, gather)  # torch came without the seed of this sample

    def fetch_each(self, positions: Iterable[BatchPositions]) -> Iterator[InputsAndTargets]:
        """Local batches one after the other, with a warning where the first has unseeded draws."""
        for number, each in enumerate(positions):
            parts = self.fetch(each)
            if not number and (warning := self.unseeded_draws(each)) is not None:
                warnings.warn(warning, stacklevel=2)
            yield parts

    def unseeded_draws(self, positions: BatchPositions) -> str | None:
        """A warning if the first sample of a fetched local batch is another one when it is made again.

        So it is where a data set draws from a generator that is not seeded here.
        """
        if self.seed is None:
            return None
        first = replace(positions, local=positions.local[:1])
        made = [fingerprint(_on_host(self.fetch(first))) for _ in range(2)]
        return None if made[0] == made[1] else _UNSEEDED.format(first.local[0])

    def _fetch(self, positions: BatchPositions, gather: Gather) -> InputsAndTargets:
        return self.transform(
            gather(positions.local), positions, lambda rows: gather(positions.all[rows])
        )

    def _gather_seeded(self, seed: int, epoch: int, indices: Indices) -> InputsAndTargets:
        """The samples at indices of the source (int64 [batch]), with seeded generators."""
        with seeded(SampleSeeds(seed, epoch, indices)) as seeds:
            try:
                return self.source.gather(indices)
            except Exception as error:
                if seeds.position is not None:
                    error.add_note(f"It was raised for sample {seeds.position} of the data set.")
                raise
