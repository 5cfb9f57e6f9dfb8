"""Where samples come from: everything that can be gathered in whole batches of given samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from isotrain.core.data.array_files import npy, npz
from isotrain.core.data.arrays import ArraySource, InputsAndTargets, arrays, as_inputs_and_targets
from isotrain.core.data.map_style import BatchIndexed, MapStyle
from isotrain.core.data.pytree import Weighted
from isotrain.core.data.streams import (
    BatchStream,
    declared_samples,
    is_loader,
    loads_by_position,
    reader,
)
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
    "npy",
    "npz",
    "stream",
]

_ACCEPTED = (
    "a tuple (inputs, targets), (inputs, targets, sample weights) or (inputs,) of arrays, one array, "
    "a dict of named arrays, "
    "npy(...) or npz(...) for files, a data set with batch indexing and column names, a torch "
    "map-style data set (__len__ and __getitem__), a torch DataLoader, a tf.data.Dataset of batches, "
    "a Keras PyDataset, a generator function or another iterable that gives (inputs, targets) anew in "
    "every epoch (not an iterator, which can be read once: give the function that makes it), an "
    "object with __len__ and gather(indices), or one that shards itself with __len__ and "
    "iterate(epoch=, seed=, replica=, replicas=)"
)
_OF_SAMPLES = (
    "data: got {0}, an IterableDataset of torch, which does not say whether it gives samples or batches. Give"
    " torch.utils.data.DataLoader({0}(...), batch_size=N), or batch_size=None where it gives batches."
)
_OF_TENSORS = "torch.utils.data.dataset.TensorDataset"
"""What gives rows of its tensors and nothing else; what is derived from it may change them."""
_UNUSED_WORKERS = (
    "data: the {} worker processes of the DataLoader are not used: every process of the run fetches its"
    " samples in one thread of its own; where fetching takes longer than a step, prepare the samples"
    " beforehand, as arrays in memory or in .npy files"
)


@runtime_checkable
class Source(Protocol):
    """Samples that can be gathered by position."""

    def __len__(self) -> int:
        """Number of samples."""

    def gather(self, indices: Indices) -> InputsAndTargets:
        """The samples at `indices` (int64 [batch], any order), as arrays of shape [batch, ...].

        Called from one thread at a time, which may be a background thread.
        """


@runtime_checkable
class ShardedStream(Protocol):
    """Batches from something that shards itself; it fixes its own order.

    The promise about the order of samples cannot hold here: which samples a batch has is the
    stream's affair, and may depend on the number of replicas. What is checked is that each local
    batch has its full share of the global batch, and that there are as many as `__len__` says, so
    that the means stay exact and no replica waits for one that has run out.
    """

    def __len__(self) -> int:
        """Global batches per epoch, the same for every replica; more than that is not read."""

    def iterate(self, *, epoch: int, seed: int, replica: int, replicas: int) -> Iterator[Any]:
        """One replica's local batches of one epoch.

        Each is (inputs, targets), (inputs, targets, sample weights) or inputs alone.
        """


AnySource = Source | ShardedStream | BatchStream


def stream(batches: Any, samples: int | None = None) -> BatchStream:
    """A source of batches that an iterable gives anew in every epoch, in an order of its own.

    Args:
        batches: a loader, a `tf.data.Dataset`, a generator function; each batch is (inputs, targets),
            (inputs, targets, sample weights) or inputs alone.
        samples: in an epoch. When left out, a loader of torch tells it by its sampler, unless it has a
            `collate_fn` of its own. Of others every process reads the first epoch ahead to count them:
            up to 64 MiB are kept for their turn, and of more a note says that training begins with the
            second reading.

    Raises:
        DataError: it can be read only once, or gives no batches.
    """
    read = reader(batches)
    if read is None:
        raise DataError(_not_accepted(batches))
    return BatchStream(read, declared_samples(batches) if samples is None else samples)


def as_source(value: Any) -> AnySource:
    """Makes a source of anything that can be one.

    A tuple or list at the top is (inputs, targets) or (inputs,); a dict is named inputs without
    targets; `arrays(inputs=..., targets=...)` says anything else. Of a torch `DataLoader` over samples by
    position, the data set and its `collate_fn` are used: order and batches are the spec's.

    Raises:
        DataError: nothing fits; lists what is accepted.
    """
    if isinstance(value, tuple | list):
        return ArraySource(*as_inputs_and_targets(value, "data"))
    if isinstance(value, Mapping) or hasattr(value, "__array__") or hasattr(value, "numpy"):
        return ArraySource(value)  # before Source: tensors have a gather of their own
    if isinstance(value, Source | ShardedStream | BatchStream):
        return value
    if is_loader(value) and loads_by_position(value):
        return _loaded(value)
    if reader(value) is not None:
        return stream(value)
    by_position = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if by_position and not isinstance(value, str | type):
        by_column = hasattr(value, "column_names")
        return BatchIndexed(value) if by_column else MapStyle(value)
    if any(kind.__name__ == "IterableDataset" for kind in type(value).__mro__):
        raise DataError(_OF_SAMPLES.format(type(value).__name__))
    raise DataError(_not_accepted(value))


def _loaded(loader: Any) -> Source:
    """The samples of a loader; whole batches of them at once where it only stacks tensors."""
    kind = type(loader.dataset)
    is_plain = f"{kind.__module__}.{kind.__qualname__}" == _OF_TENSORS
    stacks = getattr(loader.collate_fn, "__name__", "") == "default_collate"
    if is_plain and stacks and len(loader.dataset.tensors) in (1, 2, 3):
        return ArraySource(*as_inputs_and_targets(loader.dataset.tensors, "data"))
    source = MapStyle(loader.dataset, loader.collate_fn)
    if loader.num_workers:
        source.notes.append(_UNUSED_WORKERS.format(loader.num_workers))
    return source


def source_notes(source: Any) -> Iterator[str]:
    """What becomes of something that a source was made of, and is not as it was there."""
    while source is not None:
        yield from getattr(source, "notes", ())
        source = getattr(source, "source", None)


def _not_accepted(value: Any) -> str:
    return f"data: got {type(value).__name__}, which is not a data set. Accepted: {_ACCEPTED}."
