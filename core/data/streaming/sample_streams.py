"""Streams of samples: iterable data sets of torch and of libraries, with their states made uniform."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

Collate = Callable[[list[Any]], Any]
"""A function from a list of samples to a batch."""


class HuggingFaceStream:
    """Reading of an `IterableDataset` of Hugging Face, with another shuffle in each epoch, and its state.

    Its state does not have the samples in a shuffle buffer: with one, a run that resumes reads on to where
    it was.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch = -1
        self._has_state = not _has_shuffle_buffer(dataset)

    def __iter__(self) -> Iterator[Any]:
        """Starts the next epoch, or goes on with that of a loaded state."""
        self._epoch += 1
        self._dataset.set_epoch(self._epoch)
        return iter(self._dataset)

    def state_dict(self) -> dict[str, Any] | None:
        """Epoch and state; None with a shuffle buffer."""
        state = {"epoch": self._epoch, "state": self._dataset.state_dict()}
        return state if self._has_state else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on from a state."""
        self._epoch = state["epoch"] - 1
        self._dataset.load_state_dict(state["state"])


def _has_shuffle_buffer(dataset: Any) -> bool:
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        nested = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
        parts += [each for each in nested if each is not None]
    return False


class _CountedStream:
    """Reading of a data set whose state is requested with the number of samples that it has given."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._before = self._read = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        """Starts the next epoch, or goes on with that of a loaded state."""
        before, self._before = self._before, 0
        for self._read, sample in enumerate(self._dataset, before + 1):  # noqa: B020
            yield sample


class MosaicStream(_CountedStream):
    """Reading of a `StreamingDataset` of MosaicML Streaming, with its state."""

    def state_dict(self) -> Any:
        """State after the samples so far."""
        return self._dataset.state_dict(self._read, from_beginning=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on from a state."""
        self._dataset.load_state_dict(state)
        self._before = state["sample_in_epoch"]


class LitDataStream(_CountedStream):
    """Reading of a `StreamingDataset` of LitData, or of one shard of it, with its state."""

    def __init__(self, dataset: Any, shard: int = 0, shards: int = 1) -> None:
        super().__init__(_shard_of(dataset, shard, shards))

    def state_dict(self) -> Any:
        """State after the samples so far."""
        return self._dataset.state_dict(self._read, num_workers=1, batch_size=1)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on from a state."""
        self._dataset.load_state_dict(state)
        self._before = state["num_samples_yielded"]


def _shard_of(dataset: Any, shard: int = 0, shards: int = 1) -> Any:
    """A copy of a data set of LitData with the samples of one shard, whatever process this is."""
    copied = copy.copy(dataset)
    environment = type(dataset.distributed_env)
    copied.distributed_env = environment(world_size=shards, global_rank=shard, num_nodes=1)
    copied.set_drop_last(copied.drop_last and shards == 1)
    return copied


_ADAPTERS: Mapping[tuple[str, str], Callable[[Any], Iterable[Any]]] = {
    ("datasets", "IterableDataset"): HuggingFaceStream,
    ("streaming", "StreamingDataset"): MosaicStream,
    ("litdata", "StreamingDataset"): LitDataStream,
}
"""Adapters by package and class of a data set."""


def adapter_of(dataset: Any) -> Callable[[Any], Iterable[Any]] | None:
    """The adapter of a data set's library; None where it needs none."""
    names = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(dataset).__mro__]
    return next((_ADAPTERS[name] for name in names if name in _ADAPTERS), None)


def length_by_position(dataset: Any) -> int:
    """Number of samples by position; libraries that shard themselves have another length on each process."""
    adapter = adapter_of(dataset)
    if adapter is LitDataStream:
        dataset = _shard_of(dataset)
    return int(dataset.size) if adapter is MosaicStream else len(dataset)


def as_readable(dataset: Any) -> Any:
    """The data set with its state as `state_dict()`, where its library has another form of it."""
    adapter = adapter_of(dataset)
    return dataset if adapter is None else adapter(dataset)


def is_iterable_dataset(value: Any) -> bool:
    """Whether the value is an `IterableDataset` of torch, which yields samples."""
    return any(kind.__name__ == "IterableDataset" for kind in type(value).__mro__)


def batches_of(samples: Iterator[Any], size: int, collate: Collate) -> Iterator[Any]:
    """Batches of up to `size` samples each; reads no sample before its batch is requested."""
    while group := list(islice(samples, size)):
        yield collate(group)


def declared_length(dataset: Any) -> int | None:
    """Number of samples by `len`; None where there is none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
