"""From a source of samples to the batches of a run, the same ones whatever the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from isotrain.core.data import rebatch, sampler
from isotrain.core.data.arrays import (
    ArraySource,
    InputsAndTargets,
    as_array,
    as_inputs_and_targets,
    reader,
)
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.epoch_length import at_least, epoch_steps, total_steps
from isotrain.core.data.prefetch import prefetched
from isotrain.core.data.pytree import Weighted, leaves, map_tree, unweighted
from isotrain.core.data.sample_rng import SampleRandom
from isotrain.core.data.sources import AnySource, ShardedStream, Source
from isotrain.core.data.stream_state import StreamState
from isotrain.core.data.streams import BatchStream
from isotrain.core.data.transform_check import require_no_mixing
from isotrain.core.errors import DataError

Transform = Callable[[Any, Any, SampleRandom], InputsAndTargets]
ToDevice = Callable[[np.ndarray], Any]

# Up to here, gathering from memory costs less than handing the batch over from another thread; on the
# cores that replicas compute on, it costs less at any size.
_INLINE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """A slice of a replica's share; one without samples holds a placeholder.

    Attributes:
        count: Samples in it.
        weight: Of the slice.
        in_local_batch: Its rows in the share.
        in_global_batch: Its rows in the global batch.
    """

    count: int
    weight: float
    in_local_batch: slice
    in_global_batch: slice


@dataclass(frozen=True, slots=True)
class _LocalBatch:
    """One local replica's part of a global batch of some size."""

    replica: int
    start: int
    stop: int
    micro_batches: tuple[_MicroBatch, ...]

    @property
    def rows(self) -> slice:
        """Its rows in the global batch, the placeholder's when it has none."""
        return _or_first(self.start, self.stop)


Slices = tuple[Slice, ...]


class Loader:
    """The batches of a run or of an evaluation, for the replicas that live in this process.

    Each iteration starts at `start_step` and gives exactly the batches that a run from step 0 would
    give from there. Only the samples of local replicas are gathered. Treat the arrays as read-only:
    without shuffling they may be views of the data set.

    Attributes:
        tries_transform: Whether the next share is to show that the transform does not mix samples.
        steps_per_epoch: Global batches in an epoch.
        total_steps: Of the run.
    """

    def __init__(
        self,
        source: AnySource,
        *,
        global_batch_size: int,
        replicas: int,
        local_replicas: Sequence[int],
        seed: int,
        shuffle: bool,
        drop_remainder: bool,
        gradient_accumulation_steps: int = 1,
        transform: Transform | None = None,
        tries_transform: bool = False,
        epochs: int | None = None,
        steps: int | None = None,
        start_step: int = 0,
        to_device: ToDevice | None = None,
        is_on_device: rebatch.IsOnDevice = rebatch.never_on_device,
        prefetch: int = 2,
        shares_cores: bool = False,
        mark_seconds: float | None = None,
    ) -> None:
        """Plans the batches; reads no sample.

        Args:
            source: what `as_source` gives.
            global_batch_size: samples per step over all replicas.
            replicas: replicas of the whole run.
            local_replicas: the numbers of those in this process.
            seed: of the order and of the transform's draws.
            shuffle: a new order in every epoch, else that of the source.
            drop_remainder: leave out the last partial global batch of each epoch.
            gradient_accumulation_steps: slices that each replica's share is cut into.
            transform: `transform(inputs, targets, random) -> (inputs, targets)` on one share, each
                sample on its own; it may change arrays in place but not the number of samples.
            tries_transform: whether to find out, on the first share, that it does not mix samples.
            epochs: length of the run; or
            steps: the same in global batches. Exactly one of the two.
            start_step: first step to give.
            to_device: a host array -> what the replica computes on; called on each array of each slice, in
                the background thread where there is one.
            is_on_device: whether what a stream gives is already as `to_device` would make it.
            prefetch: batches made ahead in a background thread; 0 makes them when they are asked
                for, and so are batches of arrays in memory that are small, or that share cores.
            shares_cores: whether the replicas compute on the cores that gather the batches.
            mark_seconds: after which it is noted anew where a stream is that has a state of its own, as
                its batches then say; None: never.

        Raises:
            DataError: a number is out of range, or partial global batches are dropped and there is
                no full one.
        """
        at_least("global_batch_size", global_batch_size, 1)
        at_least("replicas", replicas, 1)
        at_least("gradient_accumulation_steps", gradient_accumulation_steps, 1)
        at_least("start_step", start_step, 0)
        at_least("prefetch", prefetch, 0)
        outside = [r for r in local_replicas if not 0 <= r < replicas]
        if outside or not local_replicas:
            raise DataError(
                f"local_replicas: expected some of 0 to {replicas - 1}, got {local_replicas}."
            )
        self._source = source
        self._global_batch_size = global_batch_size
        self._replicas = replicas
        self._local_replicas = tuple(local_replicas)
        self._seed = seed
        self._shuffle = shuffle
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self._transform = transform
        self.tries_transform = tries_transform
        self._to_device = to_device
        self._is_on_device = is_on_device
        self._start_step = start_step
        self._mark_seconds = mark_seconds
        self.steps_per_epoch = epoch_steps(source, global_batch_size, replicas, drop_remainder)
        self.total_steps = total_steps(epochs, steps, self.steps_per_epoch)
        self._depth = prefetch if self._worth_a_thread(shares_cores) else 0

    def __len__(self) -> int:
        """Steps that are left from `start_step` on."""
        return max(0, self.total_steps - self._start_step)

    def __iter__(self) -> Iterator[Batch]:
        """The batches from `start_step` to the end."""
        return self.from_step(self._start_step)

    def from_step(self, step: int, mark: StreamState | None = None) -> Iterator[Batch]:
        """The batches from a step to the end, the same ones that a whole iteration would give.

        Args:
            step: of the run.
            mark: of the batch of the step before, if it has one: of a place there or earlier.
        """
        if isinstance(self._source, BatchStream):
            batches = self._recut_batches(self._source, step, mark)
        elif isinstance(self._source, ShardedStream):
            batches = self._sharded_batches(self._source, step)
        else:
            batches = self._batches(self._source, step)
        return prefetched(batches, self._depth) if self._depth else batches

    def _worth_a_thread(self, shares_cores: bool) -> bool:
        source = self._source
        if (
            self._transform is not None
            or not isinstance(source, ArraySource)
            or not source.in_memory
        ):
            return True
        share = -(-self._global_batch_size // self._replicas) * len(self._local_replicas)
        return not shares_cores and share * source.sample_bytes > _INLINE_BYTES

    def _batches(self, source: Source, first: int) -> Iterator[Batch]:
        length = len(source)
        plans = {size: self._shares(size) for size in self._sizes(length)}
        slices_of = self._slicer(source)
        ordered_epoch, samples = -1, sampler.permutation(self._seed, 0, 0, shuffle=False)
        for step in range(first, self.total_steps):
            epoch, index = divmod(step, self.steps_per_epoch)
            if ordered_epoch < 0 or (self._shuffle and epoch != ordered_epoch):
                samples = sampler.permutation(self._seed, epoch, length, self._shuffle)
                ordered_epoch = epoch
            rows = sampler.global_batch_indices(samples, index, self._global_batch_size)
            slices = tuple([slices_of(share, rows, epoch) for share in plans[len(rows)]])
            yield self._batch(step, len(rows), slices)

    def _slicer(self, source: Source) -> Callable[[_LocalBatch, sampler.Indices, int], Slices]:
        """From a replica's share of a global batch, these samples of an epoch, to its slices."""
        # not by isinstance: a subclass may gather in a way of its own
        if self._transform is not None or type(source) is not ArraySource:
            return lambda share, rows, epoch: self._cut(
                share, self._gathered(source, epoch, rows, share)
            )
        read = reader(source, self._to_device, in_order=not self._shuffle)
        return lambda share, rows, epoch: tuple(
            [Slice(*read(rows[p.in_global_batch]), p.count, p.weight) for p in share.micro_batches]
        )

    def _sizes(self, length: int) -> set[int]:
        """The sizes that global batches have."""
        return {min(length, self._global_batch_size), length % self._global_batch_size} - {0}

    def _shares(self, size: int) -> tuple[_LocalBatch, ...]:
        return tuple(self._share(size, replica) for replica in self._local_replicas)

    def _share(self, size: int, replica: int) -> _LocalBatch:
        start, stop = sampler.slice_bounds(size, self._replicas, replica)
        bounds = [
            sampler.slice_bounds(stop - start, self._gradient_accumulation_steps, part)
            for part in range(self._gradient_accumulation_steps)
        ]
        micro_batches = tuple(
            self._piece(size, start if start < stop else 0, *each) for each in bounds
        )
        return _LocalBatch(replica, start, stop, micro_batches)

    def _piece(self, size: int, origin: int, start: int, stop: int) -> _MicroBatch:
        """One of a share whose rows begin at `origin`."""
        count, rows = stop - start, _or_first(start, stop)
        in_global_batch = slice(origin + rows.start, origin + rows.stop)
        return _MicroBatch(count, count * self._replicas / size, rows, in_global_batch)

    def _gathered(
        self, source: Source, epoch: int, rows: sampler.Indices, share: _LocalBatch
    ) -> InputsAndTargets:
        """The samples of one share, transformed; the placeholder when it has none."""
        own = rows[share.rows]
        return self._checked(source.gather(own), epoch, own)

    def _checked(
        self, parts: InputsAndTargets, epoch: int, own: sampler.Indices
    ) -> InputsAndTargets:
        """Transforms the parts, and sees that they are arrays with one row for each of `own`."""
        made_by = "the data set"
        if self._transform is not None:
            parts = self._transformed(parts, epoch, own)
            made_by = "the transform"
        inputs, targets = parts[0], parts[1]
        return self._rows(inputs, len(own), "inputs", made_by), (
            None if targets is None else self._rows(targets, len(own), "targets", made_by)
        )

    def _rows(self, tree: Any, expected: int, name: str, made_by: str) -> Any:
        """Every leaf as an array with `expected` rows, or as it is where it is placed."""
        tree = map_tree(
            lambda leaf: (
                leaf if self._is_on_device(leaf) else as_array(leaf, f"{made_by}'s {name}")
            ),
            tree,
        )
        for path, array in leaves(tree, name):
            if array.ndim == 0 or len(array) != expected:
                raise DataError(
                    f"{path}: {made_by} gave shape {array.shape}, expected {expected} rows (samples)."
                )
        return tree

    def _transformed(
        self, parts: InputsAndTargets, epoch: int, own: sampler.Indices
    ) -> InputsAndTargets:
        """Calls the transform, which sees no sample weights."""
        assert self._transform is not None
        targets, weights = unweighted(parts[1])
        if self.tries_transform and len(own) > 1:
            self.tries_transform = False
            require_no_mixing(
                self._transform,
                (parts[0], targets),
                lambda start, stop: SampleRandom(self._seed, epoch, own[start:stop]),
            )
        found = self._transform(parts[0], targets, SampleRandom(self._seed, epoch, own))
        if not isinstance(found, tuple) or len(found) != 2:
            raise DataError(
                f"transform: expected it to return (inputs, targets), got {found!r:.80}."
            )
        return found if weights is None else (found[0], Weighted(found[1], weights))

    def _cut(self, share: _LocalBatch, parts: InputsAndTargets) -> Slices:
        """The share's slices, placed."""
        if len(share.micro_batches) == 1:
            return (self._slice(parts, share.micro_batches[0]),)
        return tuple(self._slice(_part(parts, p.in_local_batch), p) for p in share.micro_batches)

    def _slice(self, parts: InputsAndTargets, piece: _MicroBatch) -> Slice:
        to_device = self._to_device
        if to_device is not None:
            parts = _each(lambda leaf: leaf if self._is_on_device(leaf) else to_device(leaf), parts)
        return Slice(*parts, piece.count, piece.weight)

    def _batch(
        self,
        step: int,
        size: int,
        slices: tuple[tuple[Slice, ...], ...],
        fingerprint: int | None = None,
        mark: StreamState | None = None,
    ) -> Batch:
        epoch, index = divmod(step, self.steps_per_epoch)
        last = index == self.steps_per_epoch - 1
        even = size % self._replicas == 0
        return Batch(epoch, index, step, size, last, even, slices, fingerprint, mark)

    def _recut_batches(
        self, source: BatchStream, step: int, mark: StreamState | None
    ) -> Iterator[Batch]:
        whole, plans = (
            self._global_batch_size,
            {n: self._shares(n) for n in self._sizes(len(source))},
        )
        before = mark
        while step < self.total_steps:
            epoch, skip = divmod(step, self.steps_per_epoch)
            reading = source.epoch(epoch, mark, mark_seconds=self._mark_seconds)
            found = rebatch.global_batches(
                reading,
                whole,
                len(source),
                given=reading.given,
                first=skip * whole,
                stays=self._is_on_device,
            )
            for index, (parts, size) in enumerate(found, skip):
                if index == self.steps_per_epoch or step == self.total_steps:
                    break
                slices = tuple(
                    self._cut(share, self._own(parts, size, epoch, index * whole, share))
                    for share in plans[size]
                )
                seen = rebatch.fingerprint(parts) if index == skip else None
                yield self._batch(step, size, slices, seen, reading.mark or before)
                step += 1
            before, mark = reading.mark or before, None

    def _own(
        self, parts: InputsAndTargets, size: int, epoch: int, first: int, share: _LocalBatch
    ) -> InputsAndTargets:
        """One share of a global batch whose first sample has this number; a placeholder if it has none."""
        own = parts if share.rows == slice(0, size) else _part(parts, share.rows)
        if self._transform is not None:  # it may change arrays in place, and these are the stream's
            own = _each(np.copy, own)
        rows = np.arange(share.start, max(share.stop, share.start + 1))
        return self._checked(own, epoch, first + rows)

    def _sharded_batches(self, source: ShardedStream, step: int) -> Iterator[Batch]:
        size = self._global_batch_size
        shares = self._shares(size)
        while step < self.total_steps:
            epoch, skip = divmod(step, self.steps_per_epoch)
            streams = [self._stream(source, epoch, share, skip) for share in shares]
            left = min(self.steps_per_epoch - skip, self.total_steps - step)
            for parts in islice(zip(*streams, strict=True), left):
                yield self._batch(step, size, tuple(map(self._cut, shares, parts)))
                step += 1

    def _stream(
        self, source: ShardedStream, epoch: int, share: _LocalBatch, skip: int
    ) -> Iterator[InputsAndTargets]:
        """One replica's local batches of an epoch, without the first `skip`."""
        replica, replicas = share.replica, self._replicas
        batches = iter(
            source.iterate(epoch=epoch, seed=self._seed, replica=replica, replicas=replicas)
        )
        for number in range(self.steps_per_epoch):
            batch = next(batches, None)
            if batch is None:
                raise DataError(
                    f"the stream of replica {replica} ended after {number} local batches "
                    f"of epoch {epoch}; its length promises {self.steps_per_epoch}."
                )
            if number >= skip:
                own = number * self._global_batch_size + np.arange(share.start, share.stop)
                yield self._checked(as_inputs_and_targets(batch, "a local batch"), epoch, own)


def _or_first(start: int, stop: int) -> slice:
    """The rows from `start` to `stop`; where there are none, the first as a placeholder."""
    return slice(start, stop) if start < stop else slice(0, 1)


def _each(function: Callable[[np.ndarray], Any], parts: InputsAndTargets) -> InputsAndTargets:
    """Inputs and targets, each array of them as a function makes it."""
    inputs, targets = parts
    return map_tree(function, inputs), None if targets is None else map_tree(function, targets)


def _part(parts: InputsAndTargets, rows: slice) -> InputsAndTargets:
    """Some rows of every array."""
    return _each(lambda leaf: as_array(leaf)[rows], parts)
