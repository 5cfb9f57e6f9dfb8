"""Sources of samples: the contracts of sources, and the conversion of user data to one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from isotrain.core.data.array_files import npy, npz
from isotrain.core.data.arrays import ArraySource, InputsAndTargets, arrays, as_inputs_and_targets
from isotrain.core.data.collate import Collator
from isotrain.core.data.map_style import BatchIndexed, MapStyle
from isotrain.core.data.mixture import Joined, Mixture
from isotrain.core.data.pytree import Weighted
from isotrain.core.data.streaming.sample_streams import (
    as_readable,
    declared_length,
    is_iterable_dataset,
)
from isotrain.core.data.streaming.shards import ShardedSamples
from isotrain.core.data.streaming.streams import (
    BatchStream,
    declared_samples,
    is_loader,
    reader,
)
from isotrain.core.data.torch_samplers import order_of, sampler_by_position
from isotrain.core.data.worker_settings import WorkerSettings
from isotrain.core.errors import DataError

if TYPE_CHECKING:
    from isotrain.core.data.sampler import Indices


__all__ = [
    "ArraySource",
    "BatchIndexed",
    "MapStyle",
    "ShardedStream",
    "Source",
    "Weighted",
    "arrays",
    "as_source",
    "joined",
    "mixture",
    "npy",
    "npz",
    "sample_stream",
    "stream",
]

_ACCEPTED = (
    "a tuple (inputs, targets), (inputs, targets, sample weights) or (inputs,) of arrays, one array, "
    "a dict of named arrays, "
    "npy(...) or npz(...) for files, a data set with batch indexing and column names, a torch "
    "map-style data set (__len__ and __getitem__), an IterableDataset of samples of torch or Hugging Face, "
    "a torch DataLoader, a tf.data.Dataset of batches, "
    "a Keras PyDataset, a generator function or another iterable that yields (inputs, targets) in "
    "every epoch (not an iterator, which can be read once: give the function that makes it), an "
    "object with __len__ and gather(indices), or one that shards itself with __len__ and "
    "iterate(epoch=, seed=, replica=, replicas=)"
)
_TENSOR_DATASET = "torch.utils.data.dataset.TensorDataset"
"""The class whose samples are plain rows of its tensors; a subclass may change them."""
_OWN_ORDER = (
    "data: the DataLoader's sampler is not one of torch's, so its batches are a stream in its own order:"
    " every process reads all of them. To read by position, give the data set itself, and as `order` in the"
    " spec a callable (seed, epoch, length, columns) -> positions"
)


@runtime_checkable
class Source(Protocol):
    """A source of samples that can be gathered by index."""

    def __len__(self) -> int:
        """Number of samples."""

    def gather(self, indices: Indices) -> InputsAndTargets:
        """The samples at `indices` (int64 [batch], any order), as arrays of shape [batch, ...].

        Called from one thread at a time, which may be a background thread.
        """


@runtime_checkable
class ShardedStream(Protocol):
    """A source of batches that shards itself over replicas, in its own order.

    isotrain's order of samples does not apply here: the stream decides which samples a batch has, and
    that may depend on the number of replicas. It is checked that each local batch has the full local
    batch size, and that there are as many as `__len__` says, so that means stay exact and no replica
    waits for one that has run out.
    """

    def __len__(self) -> int:
        """Number of global batches per epoch, equal for every replica; more are not read."""

    def iterate(self, *, epoch: int, seed: int, replica: int, replicas: int) -> Iterator[Any]:
        """One replica's local batches of one epoch.

        Each is (inputs, targets), (inputs, targets, sample weights) or inputs alone.
        """


AnySource = Source | ShardedStream | BatchStream


def stream(batches: Any, samples: int | None = None, *, shards: int | None = None) -> BatchStream:
    """A source of batches from an iterable that is read again in every epoch, in its own order.

    Args:
        batches: A loader, a `tf.data.Dataset`, a generator function; each batch is (inputs, targets),
            (inputs, targets, sample weights) or inputs alone, arrays of shape [n, ...].
        samples: Number of samples per epoch. When left out, it is the length of the sampler of a torch
            `DataLoader` without a custom `collate_fn`. Of other streams every process reads the first
            epoch ahead to count them: up to 64 MiB are kept, and for more a note says that training
            begins with the second reading.
        shards: Number of shards to read side by side, of which the batches come in turn, so that several
            `loader.workers` of a host can read them. `batches` is a function of (shard, shards), or an
            `IterableDataset` that yields batches and takes its shard from torch's `get_worker_info`.

    Raises:
        DataError: It can be read only once, yields no batches, or cannot be told a shard.
    """
    if shards is not None:
        sharded = ShardedSamples(batches, shards, most_chunk=1)
        return BatchStream(lambda: sharded, samples, shards=sharded)
    read = reader(batches)
    if read is None:
        raise DataError(_not_accepted(batches))
    return BatchStream(read, declared_samples(batches) if samples is None else samples)


def sample_stream(
    dataset: Any,
    inputs: str | Sequence[str] | None = None,
    targets: str | Sequence[str] | None = None,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    samples: int | Iterable[int] | None = None,
    shards: int | None = None,
) -> BatchStream:
    """A source of single samples from an iterable that is read again in every epoch, in its own order.

    Args:
        dataset: An iterable of samples, such as an `IterableDataset` of torch or Hugging Face, a data set of
            WebDataset, MosaicML Streaming or LitData, a loader of Grain or torchdata, a `tf.data.Dataset`,
            or a generator function. A sample is (inputs, targets), (inputs, targets, sample weight), inputs
            alone, or a dict with the names given here.
        inputs: For samples that are dicts: one name, several (then the inputs are a dict), or None for all
            that are not targets.
        targets: For samples that are dicts: one name, several, or None for none.
        collate: Function that makes a batch of a list of samples; by default, leaves are stacked.
        samples: Number of samples per epoch; when left out, its `len`, or they are counted as for `stream`.
            Of shards, a number for each: then global batches have the samples of a shard next to each other,
            and each host reads only the shards of its replicas' samples.
        shards: Number of shards to read side by side, of which the samples come in turn, so that several
            `loader.workers` of a host can read them. The data set is an `IterableDataset` of Hugging Face, a
            `StreamingDataset` of LitData, one that takes its shard from torch's `get_worker_info`, or a
            function of (shard, shards).

    Raises:
        DataError: It can be read only once, has its samples by position, or cannot be told a shard.
    """
    readable = as_readable(dataset)
    count: int | None
    if isinstance(samples, Iterable):
        lengths = [int(each) for each in samples]
        count, shards = sum(lengths), shards or len(lengths)
    else:
        lengths, count = None, declared_length(readable) if samples is None else samples
    if shards is not None:
        sharded = ShardedSamples(dataset, shards, lengths)
        collator = Collator(collate, inputs, targets)
        return BatchStream(lambda: sharded, count, collate=collator, shards=sharded)
    read = reader(readable)
    if read is None and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        raise DataError(
            f"data: {type(dataset).__name__} has its samples by position. Give it as it is, or as"
            " isotrain.sources.MapStyle(data, inputs=..., targets=...) if the samples are dicts."
        )
    if read is None:
        raise DataError(_not_accepted(dataset))
    return BatchStream(read, count, collate=Collator(collate, inputs, targets))


def as_source(value: Any) -> AnySource:
    """Converts user data to a source.

    A tuple or list at the top is (inputs, targets) or (inputs,); a dict is named inputs without
    targets; use `arrays(inputs=..., targets=...)` for anything else. Of a torch `DataLoader` with
    samplers of torch, only data set, `collate_fn` and the kind of order are used: batches and seed are the
    spec's.

    Raises:
        DataError: The value is no data set; the message lists what is accepted.
    """
    if isinstance(value, tuple | list):
        return ArraySource(*as_inputs_and_targets(value, "data"))
    if isinstance(value, Mapping) or hasattr(value, "__array__") or hasattr(value, "numpy"):
        return ArraySource(value)  # before Source: tensors have a `gather` method too
    if isinstance(value, Source | ShardedStream | BatchStream):
        return value
    if is_loader(value) and (sampler := sampler_by_position(value)) is not None:
        source = _loader_source(value)
        source.order = order_of(sampler, len(source))
        return source
    if is_iterable_dataset(value):
        return sample_stream(value)
    if reader(value) is not None:
        batches = stream(value)
        if (
            is_loader(value)
            and value.batch_sampler is not None
            and not is_iterable_dataset(value.dataset)
        ):
            batches.notes.append(_OWN_ORDER)
        return batches
    is_map_style = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if is_map_style and not isinstance(value, str | type):
        has_columns = hasattr(value, "column_names")
        return BatchIndexed(value) if has_columns else MapStyle(value)
    raise DataError(_not_accepted(value))


def collates(source: Any) -> bool:
    """Whether slices are made one by one of single samples, so that their shapes may differ."""
    return any(getattr(each, "collates", False) for each in _wrapped(source))


def _loader_source(loader: Any) -> ArraySource | MapStyle:
    """A source of the loader's samples; of whole arrays where it only stacks rows of tensors."""
    kind = type(loader.dataset)
    is_plain = f"{kind.__module__}.{kind.__qualname__}" == _TENSOR_DATASET
    stacks = getattr(loader.collate_fn, "__name__", "") == "default_collate"
    if is_plain and stacks and len(loader.dataset.tensors) in (1, 2, 3):
        return ArraySource(*as_inputs_and_targets(loader.dataset.tensors, "data"))
    source = MapStyle(loader.dataset, loader.collate_fn)
    if loader.num_workers:
        context = loader.multiprocessing_context
        method = None if context is None else context.get_start_method()
        source.workers = WorkerSettings(
            loader.num_workers,
            loader.prefetch_factor or 2,
            "fork" if method == "fork" else "spawn",
            loader.worker_init_fn,
            imports=("torch.utils.data",),
        )
    return source


def mixture(
    parts: Mapping[str, Any],
    ratios: Mapping[str, float] | None = None,
    *,
    samples: int | None = None,
    in_turn: bool = False,
) -> Source:
    """A source of the samples of several data sets, which must be alike in structure and shape.

    Without ratios an epoch has each sample once, all shuffled together.

    Args:
        parts: The data sets by name, each anything that `as_source` accepts except streams.
        ratios: Ratio of the samples of each data set in every stretch of an epoch. A data set is begun again
            when all of its samples are used, and the next epoch continues where this one ends.
        samples: Number of samples of an epoch, with ratios; None for all of the data sets together.
        in_turn: Whether the data sets come one after the other, each shuffled in itself.

    Raises:
        DataError: A data set is a stream, or the ratios are not one number above 0 for each data set.
    """
    sources = _by_position("mixture", parts)
    if ratios is None:
        if samples is not None:
            raise DataError("sources.mixture: `samples` needs `ratios`.")
        return Mixture(sources, is_in_turn=in_turn)
    if ratios.keys() != sources.keys() or not all(0 < each < math.inf for each in ratios.values()):
        raise DataError(
            f"sources.mixture: expected a ratio above 0 for each of {', '.join(sources)}, received {ratios}."
        )
    if in_turn:
        raise DataError("sources.mixture: `in_turn` with ratios; leave one of the two out.")
    return Mixture(sources, [ratios[name] for name in sources], samples)


def joined(
    parts: Mapping[str, Any], *, rows: Literal["longest", "shortest"] | int = "longest"
) -> Source:
    """A source of rows that have one sample of each data set: a dict of inputs, and one of targets, by name.

    Each data set has an order of its own, so that other samples meet in every epoch.

    Args:
        parts: The data sets by name, each anything that `as_source` accepts except streams.
        rows: Rows of an epoch: as many as the longest data set has samples, or the shortest, or a number.
            Shorter data sets are begun again; of longer ones, the next epoch goes on where this one ends.

    Raises:
        DataError: A data set is a stream, or there are too many combinations.
    """
    sources = _by_position("joined", parts)
    lengths = [len(source) for source in sources.values()]
    counts = {"longest": max(lengths), "shortest": min(lengths)}
    return Joined(sources, counts[rows] if isinstance(rows, str) else rows)


def _by_position(function: str, parts: Mapping[str, Any]) -> dict[str, Source]:
    """Sources of data sets, by name."""
    if not parts:
        raise DataError(f"sources.{function}: expected data sets by name, received none.")
    sources: dict[str, Source] = {}
    for name, part in parts.items():
        source = as_source(part)
        if isinstance(source, ShardedStream | BatchStream):
            raise DataError(
                f"sources.{function}: {name} is a stream, which cannot be read by position. Give arrays or a"
                " map-style data set, or mix the streams in a generator function."
            )
        if getattr(source, "order", None) is not None:
            raise DataError(
                f"sources.{function}: {name} has an order of its own, as by a sampler. Give its data set."
            )
        sources[name] = source
    return sources


def source_notes(source: Any) -> Iterator[str]:
    """Notes for the plan of a source and of the sources it wraps."""
    for each in _wrapped(source):
        yield from getattr(each, "notes", ())


def source_workers(source: Any) -> WorkerSettings | None:
    """Settings of worker processes that a source's DataLoader has; None without any."""
    settings = (getattr(each, "workers", None) for each in _wrapped(source))
    return next((each for each in settings if each is not None), None)


def _wrapped(source: Any) -> Iterator[Any]:
    """A source, and the sources that it wraps."""
    while source is not None:
        yield source
        source = getattr(source, "source", None)


def _not_accepted(value: Any) -> str:
    return f"data: received {type(value).__name__}, which is not a data set. Accepted: {_ACCEPTED}."
