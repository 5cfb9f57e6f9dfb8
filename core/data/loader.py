"""The data loader of a run: global batches that do not depend on the number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, tee
from typing import Any

import numpy as np

from isotrain.core.data import sampler
from isotrain.core.data.arrays import (
    ArraySource,
    InputsAndTargets,
    as_array,
    as_inputs_and_targets,
    reader,
)
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.epoch_length import stream_steps, total_steps
from isotrain.core.data.fetch import BatchPositions, Fetcher, Transform, TransformedBatches
from isotrain.core.data.host_reader.host_reader import SharedStream
from isotrain.core.data.order.order import Order, sequential
from isotrain.core.data.order.permutation import random_of
from isotrain.core.data.order.samples import Samples
from isotrain.core.data.prefetch import prefetched
from isotrain.core.data.pytree import map_parts
from isotrain.core.data.sampler import at_least
from isotrain.core.data.sources import AnySource, ShardedStream, Source, collates
from isotrain.core.data.streaming import rebatch
from isotrain.core.data.streaming.stream_reader import (
    GlobalBatch,
    RowsOf,
    StreamCut,
    global_batches,
)
from isotrain.core.data.streaming.stream_state import StreamState
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.data.subset import Repeating
from isotrain.core.data.worker_settings import WorkerSettings
from isotrain.core.data.workers.pool import WorkerPool
from isotrain.core.errors import DataError

ToDevice = Callable[[np.ndarray], Any]
"""A function from an array of a slice to a tensor on the device."""

# Up to this size, gathering from memory costs less than passing the batch from another thread; on the
# cores that replicas compute on, it costs less at any size.
_INLINE_BYTES = 256 * 1024
_VERIFIED = 0x7E51F
"""Key of the random numbers that choose the verified parts."""


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """The rows of one slice; without samples, those of a placeholder.

    Attributes:
        count: Number of samples.
        weight: Weight of the slice; see `Slice`.
        in_local_batch: Rows in the replica's local batch.
        in_global_batch: Rows in the global batch.
    """

    count: int
    weight: float
    in_local_batch: slice
    in_global_batch: slice


@dataclass(frozen=True, slots=True)
class _LocalBatch:
    """The rows of a replica's local batch, in global batches of one size."""

    replica: int
    start: int
    stop: int
    micro_batches: tuple[_MicroBatch, ...]

    @property
    def rows(self) -> slice:
        """Rows in the global batch; if there are none, the row of the placeholder."""
        return _rows_or_placeholder(self.start, self.stop)


Slices = tuple[Slice, ...]


class Loader:
    """The batches of a run or of an evaluation, for the local replicas of this process.

    Each iteration starts at `start_step` and yields exactly the batches that a run from step 0 would
    yield from there. Only the samples of local replicas are gathered. Treat the arrays as read-only:
    without shuffling they may be views of the data set.

    Attributes:
        transformed: The transform with its check.
        steps_per_epoch: Number of global batches in an epoch.
        total_steps: Number of steps of the run.
    """

    def __init__(
        self,
        source: AnySource | None,
        *,
        global_batch_size: int,
        replicas: int,
        local_replicas: Sequence[int],
        seed: int,
        drop_remainder: bool,
        order: Order | None = None,
        gradient_accumulation_steps: int = 1,
        parts: int | None = None,
        cuts_parts: bool = True,
        verify_every: int | None = None,
        transform: Transform | None = None,
        tries_transform: bool = False,
        epochs: int | None = None,
        steps: int | None = None,
        epoch_steps: int | None = None,
        start_step: int = 0,
        to_device: ToDevice | None = None,
        is_on_device: rebatch.IsOnDevice = rebatch.never_on_device,
        prefetch: int = 2,
        shares_cores: bool = False,
        workers: WorkerSettings | None = None,
        state_seconds: float | None = None,
    ) -> None:
        """Plans the batches; reads no sample.

        Args:
            source: A source, as from `as_source`; None for none, which needs `steps`: all are one epoch.
            global_batch_size: Samples per step over all replicas.
            replicas: Number of replicas in the run.
            local_replicas: Indices of the replicas in this process.
            seed: Seed of the transform's random numbers.
            drop_remainder: Whether to leave out the last partial global batch of each epoch of a source
                without `order`.
            order: Order of a source by position; None for that of the source itself.
            gradient_accumulation_steps: Slices per local batch.
            parts: Parts of a global batch, whatever the number of replicas, of which each replica gets whole
                ones; None: local batches are equal shares.
            cuts_parts: Whether each part is a slice; else slices are equal shares of the local batches.
            verify_every: Steps from one batch with a `verified` part to the next, for data by position;
                None: there is none.
            transform: `transform(inputs, targets, random) -> (inputs, targets)` of a local batch, each
                sample independently; it may change arrays in place but not the number of samples.
            tries_transform: Whether to check, on the first local batch, that it does not mix samples.
            epochs: Length of the run in epochs; or
            steps: Length of the run in global batches. Exactly one of the two.
            epoch_steps: Global batches that count as an epoch; None for a pass over the data. A stream then
                may be endless: no samples are counted, and where it ends, it is read again.
            start_step: First step to yield.
            to_device: Function from a host array to the replica's tensor; called on each array of each
                slice, in the background thread where there is one.
            is_on_device: Whether a leaf of a stream is already as `to_device` would make it.
            prefetch: Number of batches to make ahead in a background thread; 0 makes them on demand, as
                are small batches of arrays in memory, and those that share cores.
            shares_cores: Whether the replicas compute on the cores that gather the batches.
            workers: Processes that make local batches of samples by position, and seed the global random
                generators for each sample; None: this process makes them, without seeds.
            state_seconds: Seconds between two states of a stream, `stream_state` of a batch; None for none.

        Raises:
            DataError: A number is out of range, or partial global batches are dropped and there is no full
                one.
        """
        at_least("global_batch_size", global_batch_size, 1)
        at_least("gradient_accumulation_steps", gradient_accumulation_steps, 1)
        at_least("start_step", start_step, 0)
        at_least("prefetch", prefetch, 0)
        _require_replicas(replicas, local_replicas)
        self._source = source
        self._global_batch_size = global_batch_size
        self._replicas = replicas
        self._local_replicas = tuple(local_replicas)
        self._seed = seed
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self._parts = parts
        self._part_counts = None if parts is None else sampler.equal_part_counts(parts, replicas)
        self._cuts_parts = parts is not None and cuts_parts
        self._verify_every = verify_every
        self._has_transform = transform is not None
        self.transformed = TransformedBatches(
            transform, seed, checks_transform=tries_transform, is_on_device=is_on_device
        )
        self._collates = collates(source)
        self._to_device = to_device
        self._is_on_device = is_on_device
        self._start_step = start_step
        self._state_seconds = state_seconds
        self._is_repeated = epoch_steps is not None
        self._order: Order | None = None
        self._fetcher: Fetcher | None = None
        self._pool: WorkerPool | None = None
        self._is_plain = transform is None and isinstance(source, ArraySource) and source.in_memory
        if source is None:
            self._steps_per_pass = steps or 1
        elif epoch_steps is not None and isinstance(source, BatchStream):
            self._steps_per_pass = epoch_steps
        elif isinstance(source, BatchStream | ShardedStream):
            self._steps_per_pass = stream_steps(source, global_batch_size, replicas, drop_remainder)
        else:
            self._order = order or self._sequential(source, drop_remainder)
            self._steps_per_pass = self._order.steps_per_epoch
            self._fetcher = self._fetcher_of(source, self._order, workers)
            self._pool = self._pool_of(self._fetcher, workers)
        self.steps_per_epoch = epoch_steps or self._steps_per_pass
        self.total_steps = total_steps(epochs, steps, self.steps_per_epoch)
        is_inline = workers is not None and not workers.count
        self._depth = prefetch if not is_inline and self._worth_a_thread(shares_cores) else 0

    def _sequential(self, source: Source, drop_remainder: bool) -> Order:
        """The order of the data themselves."""
        return sequential(
            Samples.of(
                source,
                global_batch_size=self._global_batch_size,
                seed=self._seed,
                drop_remainder=drop_remainder,
            )
        )

    def _fetcher_of(self, source: Source, order: Order, workers: WorkerSettings | None) -> Fetcher:
        """The fetcher of a source's samples, with seeded generators if there are workers, even none."""
        seed = None if workers is None else self._seed
        return Fetcher(Repeating(source) if order.repeats else source, self.transformed, seed)

    def _pool_of(self, fetcher: Fetcher, workers: WorkerSettings | None) -> WorkerPool | None:
        """Worker processes; None without any, and for rows of arrays in memory, which are copied faster."""
        if workers is None or not workers.count or self._is_plain:
            return None
        return WorkerPool(fetcher, workers)

    def __len__(self) -> int:
        """Number of steps from `start_step` to the end."""
        return max(0, self.total_steps - self._start_step)

    def __iter__(self) -> Iterator[Batch]:
        """The batches from `start_step` to the end."""
        return self.from_step(self._start_step)

    def from_step(
        self,
        step: int,
        stream_state: StreamState | None = None,
        part_counts: tuple[int, ...] | None = None,
    ) -> Iterator[Batch]:
        """The batches from a step to the end, equal to those of a full iteration.

        Args:
            step: Index of the step in the run.
            stream_state: Stream state of the previous batch, if it has one: at that step or earlier.
            part_counts: Number of parts of each replica, for data by position; None: they are dealt equally.

        Raises:
            DataError: There is no source.
        """
        if self._source is None:
            raise DataError(
                "data: the spec has none to train on, so each batch must be made of arrays:"
                " session.step(session.batch(inputs, targets)) in a loop of your own, for isotrain.launch."
            )
        if isinstance(self._source, BatchStream):
            batches = self._stream_batches(self._source, step, stream_state)
        elif isinstance(self._source, ShardedStream):
            batches = self._sharded_batches(self._source, step)
        else:
            assert self._order is not None
            assert self._fetcher is not None
            counts = part_counts or self._part_counts
            batches = self._batches(self._fetcher, self._order, step, counts)
        return prefetched(batches, self._depth) if self._depth else batches

    def close(self) -> None:
        """Ends the worker processes; they start again when batches are requested again."""
        if self._pool is not None:
            self._pool.close()
        if isinstance(self._source, BatchStream):
            self._source.close()

    def _worth_a_thread(self, shares_cores: bool) -> bool:
        if not self._is_plain:
            return True
        assert isinstance(self._source, ArraySource)
        local_size = -(-self._global_batch_size // self._replicas) * len(self._local_replicas)
        return not shares_cores and local_size * self._source.sample_bytes > _INLINE_BYTES

    def _batches(
        self, fetcher: Fetcher, order: Order, first: int, part_counts: tuple[int, ...] | None
    ) -> Iterator[Batch]:
        plans = {size: self._local_batches(size, part_counts) for size in order.batch_sizes}

        def plan(step: int, size: int) -> tuple[_LocalBatch, ...]:
            return (*plans[size], *self._verified_part(step, size))

        planned = self._planned(order, first)
        source, is_direct = fetcher.source, self._pool is None and not self._has_transform
        if is_direct and type(source) is ArraySource:  # a subclass may override gather
            read = reader(source, self._to_device, in_order=order.is_sequential)
            for _, step, indices in planned:
                slices = tuple(
                    [self._slices_of_rows(read, indices, e) for e in plan(step, len(indices))]
                )
                fingerprint = self._fingerprint(order, step, first, indices)
                yield self._batch(step, len(indices), slices, part_counts, fingerprint)
            return
        requested, planned = tee(planned)
        positions = (
            BatchPositions(data_pass, step, indices[rows], indices)
            for data_pass, step, indices in requested
            for local in plan(step, len(indices))
            for rows in self._fetched_rows(local)
        )
        fetch = fetcher.fetch_each if self._pool is None else self._pool.fetch
        parts = fetch(positions)
        for _, step, indices in planned:
            slices = tuple([self._slices(each, parts) for each in plan(step, len(indices))])
            fingerprint = self._fingerprint(order, step, first, indices)
            yield self._batch(step, len(indices), slices, part_counts, fingerprint)
            del slices  # a worker may write to their memory again

    def _planned(self, order: Order, first: int) -> Iterator[tuple[int, int, sampler.Indices]]:
        """Pass, step and sample indices (int64 [size]) of the global batches from a step to the end."""
        for step in range(first, self.total_steps):
            data_pass, index = divmod(step, self._steps_per_pass)
            if index == 0 or step == first:
                indices_of = order.epoch(data_pass)
            yield data_pass, step, indices_of(index)

    def _fingerprint(
        self, order: Order, step: int, first: int, indices: sampler.Indices
    ) -> int | None:
        """Fingerprint for the first batch of each pass, if processes compare the order."""
        is_first = step == first or step % self._steps_per_pass == 0
        return order.fingerprint(indices) if order.is_compared and is_first else None

    def _fetched_rows(self, local: _LocalBatch) -> list[slice]:
        """Rows in the global batch that are fetched at once: the local batch, or each of its slices."""
        if self._collates:
            return [each.in_global_batch for each in local.micro_batches]
        return [local.rows]

    def _slices(self, local: _LocalBatch, parts: Iterator[InputsAndTargets]) -> Slices:
        """The slices of a local batch from the next fetched arrays `[batch, ...]`, on the device."""
        if self._collates:
            return tuple([self._slice(next(parts), each) for each in local.micro_batches])
        return self._cut(local, next(parts))

    def _slices_of_rows(
        self,
        read: Callable[[sampler.Indices], InputsAndTargets],
        indices: sampler.Indices,
        local: _LocalBatch,
    ) -> Slices:
        """The slices of a local batch of plain rows, on the device."""
        return tuple(
            [
                Slice(*read(indices[p.in_global_batch]), p.count, p.weight, p.in_global_batch.start)
                for p in local.micro_batches
            ]
        )

    def _global_batch_sizes(self, length: int) -> set[int]:
        """The sizes of global batches in an epoch of `length` samples."""
        return {min(length, self._global_batch_size), length % self._global_batch_size} - {0}

    def _local_batches(
        self, size: int, part_counts: tuple[int, ...] | None
    ) -> tuple[_LocalBatch, ...]:
        return tuple(self._local_batch(size, each, part_counts) for each in self._local_replicas)

    def _local_batch(
        self, size: int, replica: int, part_counts: tuple[int, ...] | None
    ) -> _LocalBatch:
        start, stop = sampler.slice_bounds(size, self._replicas, replica, part_counts)
        slices = self._gradient_accumulation_steps
        if part_counts is not None and self._cuts_parts:
            slices = part_counts[replica]
        bounds = [sampler.slice_bounds(stop - start, slices, index) for index in range(slices)]
        micro_batches = tuple(
            self._micro_batch(size, start if start < stop else 0, *each) for each in bounds
        )
        return _LocalBatch(replica, start, stop, micro_batches)

    def _verified_part(self, step: int, size: int) -> list[_LocalBatch]:
        """The part of a global batch that all replicas compute; none in most steps."""
        if self._verify_every is None or step % self._verify_every:
            return []
        assert self._parts is not None
        part = int(random_of(self._seed, _VERIFIED, step).integers(min(self._parts, size)))
        start, stop = sampler.slice_bounds(size, self._parts, part)
        micro_batch = self._micro_batch(size, start, 0, stop - start)
        return [_LocalBatch(self._local_replicas[0], start, stop, (micro_batch,))]

    def _micro_batch(self, size: int, origin: int, start: int, stop: int) -> _MicroBatch:
        """Rows `start` to `stop` of the local batch that begins at row `origin` of the global batch."""
        count, rows = stop - start, _rows_or_placeholder(start, stop)
        in_global_batch = slice(origin + rows.start, origin + rows.stop)
        return _MicroBatch(count, count * self._replicas / size, rows, in_global_batch)

    def _cut(self, local: _LocalBatch, parts: InputsAndTargets) -> Slices:
        """The slices of a local batch (arrays of shape [batch, ...]), on the device."""
        if len(local.micro_batches) == 1:
            return (self._slice(parts, local.micro_batches[0]),)
        return tuple(
            self._slice(slice_rows(parts, p.in_local_batch), p) for p in local.micro_batches
        )

    def _slice(self, parts: InputsAndTargets, micro_batch: _MicroBatch) -> Slice:
        to_device = self._to_device
        if to_device is not None:
            parts = map_parts(
                lambda leaf: leaf if self._is_on_device(leaf) else to_device(leaf), parts
            )
        first = micro_batch.in_global_batch.start
        return Slice(*parts, micro_batch.count, micro_batch.weight, first)

    def _batch(
        self,
        step: int,
        size: int,
        slices: tuple[tuple[Slice, ...], ...],
        part_counts: tuple[int, ...] | None,
        fingerprint: int | None = None,
        stream_state: StreamState | None = None,
    ) -> Batch:
        epoch, index = divmod(step, self.steps_per_epoch)
        last = index == self.steps_per_epoch - 1
        shares = self._parts or self._replicas
        even = not self._cuts_parts and not (shares % self._replicas or size % shares)
        count = len(self._local_replicas)
        local, verified = slices[:count], slices[count:]
        return Batch(
            *(epoch, index, step, size, last, even, local, fingerprint, stream_state),
            varying_widths=self._collates,
            part_counts=part_counts if self._cuts_parts else None,
            verified=verified[0][0] if verified else None,
        )

    def _stream_batches(
        self, source: BatchStream, step: int, stream_state: StreamState | None
    ) -> Iterator[Batch]:
        cut = StreamCut(
            self._global_batch_size,
            self.steps_per_epoch,
            self.total_steps,
            self._is_repeated,
            self._state_seconds,
        )
        # a transform may ask for partners in the rest of the global batch, unless shards are read apart
        needs_all = self._has_transform and not source.is_read_apart
        chosen = range(self._replicas) if needs_all else self._local_replicas
        rows_of = RowsOf(self._replicas, list(chosen), self._parts)
        if isinstance(source, SharedStream):
            batches = source.shared_batches(cut, step, stream_state, rows_of)
        else:
            batches = global_batches(source, cut, step, stream_state, rows_of, self._is_on_device)
        plans: dict[int, tuple[_LocalBatch, ...]] = {}
        counts = self._part_counts
        for each in batches:
            if each.size not in plans:
                plans[each.size] = self._local_batches(each.size, counts)
            epoch, index = divmod(step, self.steps_per_epoch)
            rows = index * self._global_batch_size + np.arange(each.size)
            slices = tuple(
                self._cut(local, self._local_part(source, each, epoch, step, rows, local))
                for local in plans[each.size]
            )
            yield self._batch(step, each.size, slices, counts, each.fingerprint, each.stream_state)
            step += 1

    def _local_part(
        self,
        source: BatchStream,
        batch: GlobalBatch,
        epoch: int,
        step: int,
        rows: sampler.Indices,
        local: _LocalBatch,
    ) -> InputsAndTargets:
        """Samples of a local batch, arrays `[samples, ...]`, transformed; the placeholder if it has none."""
        local_parts, first = batch.parts, batch.first_row
        if local.rows != slice(0, len(rows)):
            local_rows = slice(local.rows.start - first, local.rows.stop - first)
            local_parts = slice_rows(local_parts, local_rows)
        if self._has_transform:  # it may change arrays in place, and these are the stream's
            local_parts = map_parts(np.copy, local_parts)
        positions = BatchPositions(epoch, step, rows[local.rows], rows)
        gather = None if source.is_read_apart else partial(slice_rows, batch.parts)
        return self.transformed(local_parts, positions, gather)

    def _sharded_batches(self, source: ShardedStream, step: int) -> Iterator[Batch]:
        size = self._global_batch_size
        local_batches = self._local_batches(size, self._part_counts)
        while step < self.total_steps:
            epoch, skip = divmod(step, self._steps_per_pass)
            streams = [self._replica_stream(source, epoch, each, skip) for each in local_batches]
            remaining = min(self._steps_per_pass - skip, self.total_steps - step)
            for parts in islice(zip(*streams, strict=True), remaining):
                slices = tuple(map(self._cut, local_batches, parts))
                yield self._batch(step, size, slices, self._part_counts)
                step += 1

    def _replica_stream(
        self, source: ShardedStream, epoch: int, local: _LocalBatch, skip: int
    ) -> Iterator[InputsAndTargets]:
        """One replica's local batches of an epoch, without the first `skip`."""
        replica, replicas = local.replica, self._replicas
        batches = iter(
            source.iterate(epoch=epoch, seed=self._seed, replica=replica, replicas=replicas)
        )
        for number in range(self._steps_per_pass):
            batch = next(batches, None)
            if batch is None:
                raise DataError(
                    f"the stream of replica {replica} ended after {number} local batches "
                    f"of epoch {epoch}; its length promises {self._steps_per_pass}."
                )
            if number >= skip:
                step = epoch * self._steps_per_pass + number
                rows = number * self._global_batch_size + np.arange(self._global_batch_size)
                positions = BatchPositions(epoch, step, rows[local.start : local.stop], rows)
                yield self.transformed(as_inputs_and_targets(batch, "a local batch"), positions)


def _require_replicas(replicas: int, local: Sequence[int]) -> None:
    """Checks the number of replicas, and the indices of those of this process.

    Raises:
        DataError: There is none, or an index is out of range.
    """
    at_least("replicas", replicas, 1)
    if not local or any(not 0 <= each < replicas for each in local):
        raise DataError(f"local_replicas: expected some of 0 to {replicas - 1}, received {local}.")


def _rows_or_placeholder(start: int, stop: int) -> slice:
    """The rows from `start` to `stop`; if there are none, the first row as a placeholder."""
    return slice(start, stop) if start < stop else slice(0, 1)


def slice_rows(parts: InputsAndTargets, rows: slice | sampler.Indices) -> InputsAndTargets:
    """These rows of every array: views of a slice, copies by index."""
    return map_parts(lambda leaf: as_array(leaf)[rows], parts)
