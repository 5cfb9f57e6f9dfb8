"""The data of a session: loading the data set, and data loaders for training and evaluation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.data.arrays import ArraySource
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.collate import Collate, Padding
from isotrain.core.data.dataset import DataSet, as_dataset, changed
from isotrain.core.data.fetch import BatchPositions, Fetcher, TransformedBatches
from isotrain.core.data.host_reader.host_reader import HostReader
from isotrain.core.data.loader import Loader, ToDevice
from isotrain.core.data.map_style import with_collate
from isotrain.core.data.order.named_orders import ordered
from isotrain.core.data.order.order import MakeOrder, Order, sequential, shuffled
from isotrain.core.data.order.samples import Samples
from isotrain.core.data.pytree import map_parts
from isotrain.core.data.refusals import TRANSFORM
from isotrain.core.data.sampler import steps_per_epoch
from isotrain.core.data.sources import (
    AnySource,
    ShardedStream,
    as_source,
    collates,
    source_notes,
    source_workers,
    stream,
)
from isotrain.core.data.streaming.rebatch import never_on_device
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.data.subset import class_weighted, split
from isotrain.core.data.worker_settings import WorkerSettings
from isotrain.core.errors import DataError, IsotrainError
from isotrain.core.quantities import counted
from isotrain.core.spec import import_strings
from isotrain.core.spec.collate import Pad
from isotrain.core.spec.field_combinations import NEED_TRAINING_DATA
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.hardware import cores


def load_data(spec: TrainingSpec) -> DataSet:
    """Loads the spec's data set, with its validation split and class weights; an empty one without `data`.

    Raises:
        DataError: The data is not a data set, or has no training part and the spec needs one; or
            `validation_split` is set for data with a validation part.
    """
    if spec.data is None:
        return DataSet(None)
    data = changed(load_dataset(spec.data, spec.data_args), functools.partial(_set_up, spec=spec))
    if (collate := collate_of(spec)) is not None:
        data = changed(data, lambda source: with_collate(source, collate))
    needing = [name for name in NEED_TRAINING_DATA if getattr(spec, name) is not None]
    if data.train is None and needing:
        raise DataError(
            f"data: it has no training part, which {', '.join(needing)} of the spec needs."
        )
    return _split_and_weighted(data, spec)


def _set_up(source: AnySource, spec: TrainingSpec) -> AnySource:
    """The source, after what makes its batches has the seed and the time-out of the spec."""
    if isinstance(source, BatchStream):
        # sooner than the processes that wait for a reader of the host, which knows what hangs
        source.set_up_processes(spec.seed, 0.81 * spec.timeouts.progress)
    return source


def collate_of(spec: TrainingSpec) -> Collate | None:
    """The function or padding that makes batches of single samples; None where they are stacked."""
    collate = spec.collate
    if isinstance(collate, Pad):
        return Padding(collate.pad, collate.length, collate.multiple)
    return None if collate is None else import_strings.resolve(collate)


def load_dataset(data: Any, arguments: Mapping[str, Any]) -> DataSet:
    """Loads a data set from a data function, or from the data itself.

    Args:
        data: Function that returns data, data, or an import string of either.
        arguments: Keyword arguments of the function.

    Raises:
        DataError: The data is not a data set.
        IsotrainError: There are arguments, and `data` is the data itself.
    """
    source = import_strings.resolve(data)
    is_data = hasattr(source, "__getitem__") and not isinstance(source, type)
    if callable(source) and not is_data:
        function = functools.partial(source, **arguments)
        source = function()
        if isinstance(source, Iterator):  # it can be read once: the function begins each epoch
            source = stream(function)
    elif arguments:
        raise IsotrainError("data_args: they are for a data function, and data is the data itself.")
    return as_dataset(source)


def _split_and_weighted(data: DataSet, spec: TrainingSpec) -> DataSet:
    if spec.validation_split is not None:
        if data.validation is not None:
            raise DataError(
                "validation_split: the data have a validation part; leave one of them out."
            )
        train, validation = split(data.train, spec.validation_split)
        data = replace(data, train=train, validation=validation)
    if spec.class_weight is not None:
        data = replace(data, train=class_weighted(data.train, spec.class_weight))
    return data


STREAM_STATE_SECONDS = 1.0
"""Seconds between two reads of a stream's state: a resumed run reads that much of the stream again."""


class DataLoaders:
    """Creates the data loaders of one process.

    Attributes:
        data: Training and validation data.
        has_custom_batches: Whether a step may have been taken with samples that are not those of the data.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        plan: Plan,
        group: ReplicaGroup,
        data: DataSet,
        context: ProcessContext,
        host_reader: HostReader | None,
    ) -> None:
        self.data = data
        self._host_reader = host_reader
        self.has_custom_batches = False
        self._spec = spec
        self._backend = plan.backend
        self._float_dtype = np.dtype("float64" if spec.precision == "float64" else "float32")
        self._global_batch_size = plan.global_batch_size
        self._shares_cores = plan.backend_config.device == "cpu"
        self._group = group
        self._collate = collate_of(spec)
        self._context = context
        self._loaders: dict[tuple[int, int | None], Loader] = {}
        """Loaders of validation sets by `id` and number of parts, with their workers."""
        self._training_loader: Loader | None = None
        self._transform = None if spec.transform is None else import_strings.resolve(spec.transform)

    @property
    def samples_per_epoch(self) -> int | None:
        """Training samples of a pass over the data; None if they are not counted, or there are none."""
        train = self.data.train
        is_repeated_stream = isinstance(train, BatchStream) and self._spec.epoch_steps is not None
        if train is None or isinstance(train, ShardedStream) or is_repeated_stream:
            return None
        return len(train) if self._order is None else self._order.samples

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None where samples are not counted, and the spec does not say it."""
        spec, samples = self._spec, self.samples_per_epoch
        if samples is None or spec.epoch_steps is not None:
            return spec.epoch_steps
        if self._order is not None:
            return self._order.steps_per_epoch
        return steps_per_epoch(samples, self._global_batch_size, spec.drop_remainder)

    @property
    def reads_shards(self) -> bool:
        """Whether this process reads shards of the training stream that rank 0 may not read.

        Of the processes that share a reader, that is the first of their host.
        """
        train, context = self.data.train, self._context
        reads_apart = isinstance(train, BatchStream) and train.is_read_apart
        shares_reader = self._host_reader is not None and context.local_rank > 0
        return reads_apart and context.rank > 0 and not shares_reader

    def data_read(self) -> dict[str, dict[str, int]]:
        """Samples and bytes that each host has read of the training stream; empty for data by position.

        Collective.
        """
        if not isinstance(self.data.train, BatchStream):
            return {}
        count = self.data.train.read_count
        sessions = [each for each in self._context.processes if each.has_session]
        index = [each.rank for each in sessions].index(self._context.rank)
        rows = np.zeros((len(sessions), 2))
        rows[index] = count.samples, count.bytes
        if len(sessions) > 1:  # a coordinator of workers cannot communicate
            rows = np.reshape(self._group.all_reduce_max(rows.ravel().tolist()), rows.shape)
        read: dict[str, dict[str, int]] = {}
        for process, (samples, size) in zip(sessions, rows.astype(int).tolist(), strict=True):
            host = read.setdefault(process.host, {"samples": 0, "bytes": 0})
            if self._host_reader is None:
                host["samples"] += samples
                host["bytes"] += size
            else:  # each has the reader's count, as of the last batch that it was sent
                samples, size = max(samples, host["samples"]), max(size, host["bytes"])
                host.update(samples=samples, bytes=size)
        return read

    def notes(self) -> list[str]:
        """Plan notes on the data and on worker processes, without repeats."""
        sources = (self.data.train, *self.data.all_validation.values())
        notes = [each for source in sources for each in source_notes(source)]
        if self._order is not None and len(sizes := self._order.batch_sizes) > 2:
            notes.append(f"order: global batches have {min(sizes)} to {max(sizes)} samples")
        return list(dict.fromkeys([*notes, *self._worker_notes()]))

    def _worker_notes(self) -> list[str]:
        """Notes on the processes that load the training data; none without them."""
        train, settings = self.data.train, self._workers_of_host(self.data.train)
        if settings is None or not settings.count:
            return []
        if isinstance(train, ShardedStream):
            return ["loader.workers: not used, as the training data shard themselves"]
        if isinstance(train, BatchStream):
            shards = 1 if train.shards is None else train.shards.shards
            count = min(settings.count, shards)
            processes = (
                f"{counted(count, 'process')} on each host read"
                if count > 1
                else ("one process on each host reads")
            )
            note = f"loader: {processes} the training data for all replicas there"
            if settings.count > count:
                note += f", as they have {shards} shard{'s' * (shards > 1)}; see `shards` of sources.stream"
            return [note]
        if isinstance(train, ArraySource) and train.in_memory and self._transform is None:
            return ["loader.workers: not used, as rows of arrays in memory are copied faster"]
        count, available = settings.count, cores()
        note = (
            f"loader: {count} worker process{'es' * (count > 1)} on each host for the training data"
        )
        return [f"{note}, with {available} cores here" if count > available else note]

    def training(self) -> Loader:
        """The loader of training batches for the local replicas."""
        workers = self._workers(self.data.train)
        loader = self._training(self._group.local_replicas, self.to_device, workers)
        self._training_loader = loader
        return loader

    def samples(self, step: int) -> Batch | None:
        """The batch of a step, for all replicas, as NumPy arrays; None where it cannot be read again."""
        train = self.data.train
        is_stream = train is None or isinstance(train, ShardedStream | BatchStream)
        if is_stream or self.has_custom_batches:
            return None
        all_replicas = tuple(range(self._group.replicas))
        workers = self._workers(train)
        here = None if workers is None else replace(workers, count=0)
        return next(self._training(all_replicas, None, here).from_step(step))

    def _workers_of_host(self, source: Any) -> WorkerSettings | None:
        """Settings of a host's workers: the spec's, else those of a DataLoader, whose imports stay."""
        options, settings = self._spec.loader, source_workers(source)
        if options.workers is None:
            return settings
        return replace(
            settings or WorkerSettings(0),
            count=options.workers,
            prefetch=options.prefetch,
            start=options.start,
        )

    def _workers(self, source: Any) -> WorkerSettings | None:
        """Settings of this process's workers: its part of the host's, at least one of them."""
        settings = self._workers_of_host(source)
        if settings is None:
            return None
        count, rest = divmod(settings.count, self._context.local_world_size)
        count = max(count + (self._context.local_rank < rest), min(settings.count, 1))
        return replace(settings, count=count, timeout=0.9 * self._spec.timeouts.progress)

    def _training(
        self,
        local_replicas: Sequence[int],
        to_device: ToDevice | None,
        workers: WorkerSettings | None,
    ) -> Loader:
        field = "reproducible" if self._spec.reproducible else "batch_norm: ghost"
        if self._spec.dealt_parts and isinstance(self.data.train, ShardedStream):
            raise DataError(
                f"{field}: the training data shard themselves, into other global batches for each number"
                " of replicas. Give arrays, or a stream of global batches."
            )
        return Loader(
            self.data.train,
            global_batch_size=self._global_batch_size,
            replicas=self._group.replicas,
            local_replicas=local_replicas,
            seed=self._spec.seed,
            drop_remainder=self._spec.drop_remainder,
            order=self._order,
            gradient_accumulation_steps=self._spec.gradient_accumulation_steps,
            parts=self._spec.dealt_parts,
            cuts_parts=self._spec.parts is not None,
            verify_every=self._spec.verify_every,
            transform=self._transform,
            tries_transform=self._group.replicas > 1
            and to_device is not None
            and not self._spec.silences(TRANSFORM),
            epochs=self._spec.epochs,
            steps=self._spec.steps,
            epoch_steps=self._spec.epoch_steps,
            to_device=to_device,
            is_on_device=never_on_device if to_device is None else self._group.is_on_device,
            prefetch=self._spec.loader.prefetch,
            shares_cores=self._shares_cores,
            workers=workers,
            state_seconds=None if self._spec.checkpoint is None else STREAM_STATE_SECONDS,
        )

    @functools.cached_property
    def _order(self) -> Order | None:
        """Order of the training samples; None for a stream, or without training data."""
        train, spec = self.data.train, self._spec
        if train is None or isinstance(train, ShardedStream | BatchStream):
            if spec.order is not None:
                raise DataError(
                    "order: the data are a stream, which has its own order. Leave it out, or give data by"
                    " position, such as arrays or a map-style data set."
                )
            return None
        data = Samples.of(
            train,
            global_batch_size=self._global_batch_size,
            seed=spec.seed,
            drop_remainder=spec.drop_remainder,
            shuffle=spec.shuffle,
        )
        own_order: MakeOrder | None = getattr(train, "order", None)
        if spec.order is None:
            return (own_order or (shuffled if spec.shuffle else sequential))(data)
        if own_order is not None:
            raise DataError(
                "order: the data have an order of their own, as by the ratios of a mixture or a sampler of"
                " torch. Leave one of the two out."
            )
        return ordered(data, spec.order.name, spec.order.options)

    def source(self, value: Any) -> AnySource:
        """The source of data to evaluate or predict, with the spec's `collate` unless it has one."""
        source = _set_up(as_source(value), self._spec)
        if self._collate is None or collates(source):
            return source
        return with_collate(source, self._collate)

    def evaluation(self, source: Any, parts: int | None = None) -> Iterator[Batch]:
        """One unshuffled pass over a data set, for the local replicas.

        Worker processes stay for the next pass if the data set is one of the validation sets.

        Args:
            source: Data set.
            parts: Parts of each global batch, which are the slices; None: one slice for each replica.
        """
        key = id(source), parts
        loader = self._loaders.get(key) or self._evaluation_loader(source, parts)
        if any(source is each for each in self.data.all_validation.values()):
            self._loaders[key] = loader
            yield from loader
        else:
            with contextlib.closing(loader):
                yield from loader

    def close(self) -> None:
        """Ends all worker processes, and the reader of streams."""
        for loader in (self._training_loader, *self._loaders.values()):
            if loader is not None:
                loader.close()
        if self._host_reader is not None:
            self._host_reader.close()

    def _evaluation_loader(self, source: Any, parts: int | None) -> Loader:
        return Loader(
            source,
            global_batch_size=self._spec.evaluation.batch or self._global_batch_size,
            replicas=self._group.replicas,
            local_replicas=self._group.local_replicas,
            seed=self._spec.seed,
            drop_remainder=False,
            parts=parts,
            epochs=1,
            to_device=self.to_device,
            is_on_device=self._group.is_on_device,
            prefetch=self._spec.loader.prefetch,
            shares_cores=self._shares_cores,
            workers=self._workers(source),
        )

    def first_samples(self, start: int, stop: int, count: int) -> Slice:
        """Training samples `start` to `stop` of the first `count`, as a slice made of them alone.

        Generators are as before, so that a data set that draws random numbers does not notice.
        """
        transformed = TransformedBatches(self._transform, self._spec.seed)
        fetcher = Fetcher(self.data.train, transformed, self._spec.seed)
        indices = np.arange(count)
        parts = fetcher.fetch(BatchPositions(0, 0, indices[start:stop], indices))
        return Slice(*map_parts(self.to_device, parts), stop - start, 1.0, start)

    def to_device(self, array: np.ndarray) -> Any:
        """Tensor on the device, of an array's shape, in the precision of the spec.

        Raises:
            DataError: It is an array of text, and tensors of the backend hold none.
        """
        if array.dtype.kind == "U" and not self._group.takes_text:
            raise DataError(
                f"data: they hold text, as {array.ravel()[:1].tolist()}, and tensors of {self._backend} hold"
                " numbers only. Encode it in the data set or in a `collate` of the spec; or choose the parts"
                " to use, as in isotrain.sources.MapStyle(data, inputs=..., targets=...)."
            )
        return self._group.to_device(self._as_precision(array))

    def _as_precision(self, array: np.ndarray) -> np.ndarray:
        """Casts floating-point arrays to the dtype that the model takes; other dtypes stay."""
        if array.dtype.kind == "f" and array.dtype != self._float_dtype:
            return array.astype(self._float_dtype)
        return array
