"""Where samples come from: everything that can be gathered in whole batches of given samples."""

from __future__ import annotations

import mmap
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from isotrain.core.data import streams
from isotrain.core.errors import DataError

if TYPE_CHECKING:
    from isotrain.core.data.order import Indices

BatchStream = streams.BatchStream
Array = NDArray[Any]
Parts = tuple[
    Any, Any
]  # (inputs, targets): each an array, or a tuple or dict of them; targets may be None

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
_LOCAL_HEADER_BYTES = 30  # of a zip member, before its name and extra field


@runtime_checkable
class Source(Protocol):
    """Samples that can be gathered by position."""

    def __len__(self) -> int:
        """Number of samples."""

    def gather(self, indices: Indices) -> Parts:
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
        """One replica's local batches of one epoch, each (inputs, targets) or inputs alone."""


class Weighted(NamedTuple):
    """Targets that do not count alike: what data that give (inputs, targets, sample weights) have as targets.

    Attributes:
        targets: As they would be without weights.
        weights: By which the losses of the samples are multiplied: of shape [samples], or of the losses'; one
            array for all outputs, or one for each, in a tuple or dict.
    """

    targets: Any
    weights: Any


def unweighted(targets: Any) -> tuple[Any, Any]:
    """Targets, and their sample weights or None."""
    return targets if isinstance(targets, Weighted) else (targets, None)


def same_kind(tree: tuple[Any, ...], parts: Iterable[Any]) -> tuple[Any, ...]:
    """Parts in the form of the tuple that they were made of."""
    return Weighted(*parts) if isinstance(tree, Weighted) else tuple(parts)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `function` to every leaf of nested tuples and dicts, and keeps their structure."""
    if isinstance(tree, tuple):
        return same_kind(tree, (map_tree(function, part) for part in tree))
    if isinstance(tree, dict):
        return {name: map_tree(function, part) for name, part in tree.items()}
    return function(tree)


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested tuples and dicts with its path, such as `inputs['image']`."""
    if isinstance(tree, Weighted):
        yield from leaves(tree.targets, name)
        yield from leaves(tree.weights, "sample weights")
    elif isinstance(tree, tuple):
        for position, part in enumerate(tree):
            yield from leaves(part, f"{name}[{position}]")
    elif isinstance(tree, dict):
        for key, part in tree.items():
            yield from leaves(part, f"{name}[{key!r}]")
    else:
        yield name, tree


def as_array(value: Any, name: str = "data") -> Array:
    """`value` as a NumPy array of numbers or booleans; tensors convert by their own `numpy()`.

    Raises:
        DataError: it cannot be converted, is ragged, or holds text or objects.
    """
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
        converted = value.numpy() if hasattr(value, "numpy") else value
        array = converted if isinstance(converted, np.ndarray) else np.asarray(converted)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name}: expected an array of numbers, got {type(value).__name__}: {error}"
        ) from error
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"{name}: expected numbers or booleans, got dtype {array.dtype}. "
            "Encode text and times as numbers and pad samples to one shape first, or choose other columns."
        )
    return array


def as_parts(value: Any, name: str) -> Parts:
    """One sample or batch as (inputs, targets): a tuple or list of two, or inputs alone.

    Sample weights, the third of three, go with the targets. Within them, a list of arrays or tensors is a
    tuple.
    """
    if isinstance(value, tuple | list):
        if len(value) not in (1, 2, 3):
            raise DataError(
                f"{name}: expected (inputs, targets) or (inputs, targets, sample weights), got a"
                f" {type(value).__name__} of {len(value)}. Nest several inputs in a tuple: ((a, b), targets)."
            )
        inputs, *rest = map(_as_tuples, value)
        return inputs, Weighted(*rest) if len(rest) == 2 else next(iter(rest), None)
    return value, None


def _as_tuples(tree: Any) -> Any:
    """Lists of arrays as tuples, the form in which data are nested here."""
    if isinstance(tree, list) and tree and hasattr(tree[0], "shape"):
        return tuple(map(_as_tuples, tree))
    return tree


def _length(parts: Parts) -> int:
    """The common length of all arrays."""
    found = [*leaves(parts[0], "inputs")]
    if parts[1] is not None:
        found += leaves(parts[1], "targets")
    for name, array in found:
        if array.ndim == 0:
            raise DataError(f"{name}: expected an array with one row per sample, got a scalar.")
    lengths = {name: len(array) for name, array in found}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DataError(f"expected arrays with equally many samples, got: {listed}.")
    if not lengths or not next(iter(lengths.values())):
        raise DataError("the data set is empty: expected at least one sample.")
    return next(iter(lengths.values()))


def _gatherer(array: Array) -> Callable[[Indices], Array]:
    """The quickest way to gather rows of `array` that copies nothing but those rows."""
    plain = array.view(np.ndarray)
    if plain.flags.c_contiguous and plain.flags.aligned:
        return lambda indices: plain.take(indices, axis=0)
    return lambda indices: plain[indices]  # take would first copy the whole array


def _is_whole_map(array: Array) -> bool:
    return (
        isinstance(array, np.memmap)
        and isinstance(array.base, mmap.mmap)
        and array.filename is not None
        and array.mode in ("r", "r+")
    )


@dataclass(frozen=True, slots=True)
class _Mapped:
    """What another process needs to map the same array."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    order: str

    @classmethod
    def of(cls, array: Any) -> Any:
        """The recipe for a memory-mapped array; anything else stays what it is."""
        if not _is_whole_map(array):
            return array
        order = "C" if array.flags.c_contiguous else "F"
        return cls(os.fspath(array.filename), array.dtype, array.shape, array.offset, order)

    def open(self) -> Array:
        """Maps the file, read-only."""
        order = cast("Any", self.order)
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape, order)


def _reopened(parts: Parts) -> ArraySource:
    """Rebuilds a source that was sent to this process."""
    inputs, targets = map_tree(lambda x: x.open() if isinstance(x, _Mapped) else x, parts)
    return ArraySource(inputs, targets)


class ArraySource:
    """Arrays in memory or memory-mapped; sent to another process, the latter are mapped again.

    Attributes:
        inputs: an array, or a tuple or dict of them, each of shape [samples, ...].
        targets: the same, or None.
    """

    def __init__(self, inputs: Any, targets: Any = None) -> None:
        """Takes arrays or tensors, or tuples and dicts of them; they are not copied."""
        self.inputs = _as_arrays(inputs, "inputs")
        self.targets = None if targets is None else _as_arrays(targets, "targets")
        self._size = _length((self.inputs, self.targets))
        self._gather_inputs = map_tree(_gatherer, self.inputs)
        self._gather_targets = None if self.targets is None else map_tree(_gatherer, self.targets)

    def __len__(self) -> int:
        """Number of samples."""
        return self._size

    def __reduce__(self) -> tuple[Any, ...]:
        """Mapped arrays travel as file, offset and shape; arrays in memory travel as they are."""
        return _reopened, ((map_tree(_Mapped.of, self.inputs), map_tree(_Mapped.of, self.targets)),)

    def gather(self, indices: Indices) -> Parts:
        """Copies of the samples at `indices`."""
        inputs = map_tree(lambda gather: gather(indices), self._gather_inputs)
        if self._gather_targets is None:
            return inputs, None
        return inputs, map_tree(lambda gather: gather(indices), self._gather_targets)

    def view(self, start: int, stop: int) -> Parts:
        """The samples from `start` to `stop`: no copy where the array is in writable memory."""

        def cut(array: Array) -> Array:
            part = array.view(np.ndarray)[start:stop]
            return part if part.flags.writeable else part.copy()

        inputs = map_tree(cut, self.inputs)
        return inputs, None if self.targets is None else map_tree(cut, self.targets)

    @property
    def in_memory(self) -> bool:
        """Whether no array is memory-mapped, so that gathering never waits for a disk."""
        parts = (self.inputs, () if self.targets is None else self.targets)
        return not any(isinstance(x, np.memmap) for _, x in leaves(parts, ""))

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample over all arrays."""
        parts = (self.inputs, () if self.targets is None else self.targets)
        return sum(int(x.nbytes) for _, x in leaves(parts, "")) // self._size


def _as_arrays(tree: Any, name: str) -> Any:
    """Every leaf as an array of the machine's byte order, errors named after the leaf's path."""
    if isinstance(tree, Weighted):
        return Weighted(_as_arrays(tree.targets, name), _as_arrays(tree.weights, "sample weights"))
    if isinstance(tree, tuple):
        return tuple(_as_arrays(part, f"{name}[{i}]") for i, part in enumerate(tree))
    if isinstance(tree, Mapping):
        return {str(key): _as_arrays(part, f"{name}[{key!r}]") for key, part in tree.items()}
    array = as_array(tree, name)
    if array.dtype.isnative:
        return array
    if isinstance(array, np.memmap):
        raise DataError(
            f"{name}: the file has the other byte order ({array.dtype}); convert it once."
        )
    return array.astype(array.dtype.newbyteorder("="))


def arrays(inputs: Any, targets: Any = None) -> ArraySource:
    """A source of arrays: `inputs` and `targets` are each an array, or a tuple or dict of them."""
    return ArraySource(inputs, targets)


def npy(inputs: str | Path, targets: str | Path | None = None) -> ArraySource:
    """A source of memory-mapped `.npy` files; contents are read when they are gathered.

    Args:
        inputs: file whose array has one row per sample.
        targets: the same for targets.

    Raises:
        DataError: a file is missing, is not `.npy`, or holds objects.
    """
    mapped = [None if p is None else _map_npy(Path(p).absolute(), 0) for p in (inputs, targets)]
    return ArraySource(*mapped)


def npz(path: str | Path, inputs: str = "x", targets: str | None = "y") -> ArraySource:
    """A source of two arrays of an `.npz` file.

    Arrays stored uncompressed (`numpy.savez`) are memory-mapped where they lie in the file.
    Compressed ones (`numpy.savez_compressed`) cannot be, and are loaded into memory whole, in every
    process.

    Args:
        path: the file.
        inputs: name of the inputs in it.
        targets: name of the targets in it; None for none.
    """
    file = Path(path).absolute()
    loaded = [None if name is None else _npz_member(file, name) for name in (inputs, targets)]
    return ArraySource(*loaded)


def _npz_member(path: Path, name: str) -> Array:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [entry.removesuffix(".npy") for entry in archive.namelist()]
            if name not in names:
                raise DataError(
                    f"{path}: no array named {name!r}. Available: {', '.join(names) or 'none'}."
                )
            entry = archive.getinfo(f"{name}.npy")
            if entry.compress_type != zipfile.ZIP_STORED:
                with archive.open(entry) as member:
                    return np.lib.format.read_array(member, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: expected an .npz file of plain arrays: {error}") from error
    with path.open("rb") as file:
        file.seek(entry.header_offset + _LOCAL_HEADER_BYTES - 4)
        name_and_extra = int.from_bytes(file.read(2), "little") + int.from_bytes(
            file.read(2), "little"
        )
    return _map_npy(path, entry.header_offset + _LOCAL_HEADER_BYTES + name_and_extra)


def _map_npy(path: Path, start: int) -> Array:
    """Maps the `.npy` contents that begin at byte `start` of a file."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
            offset = file.tell()
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected a .npy array of numbers: {error}") from error


class BatchIndexed:
    """Anything with `__len__` whose `data[[i, j, ...]]` gives a dict of columns."""

    def __init__(
        self,
        data: Any,
        inputs: str | Sequence[str] | None = None,
        targets: str | Sequence[str] | None = None,
    ) -> None:
        """Chooses columns.

        Args:
            data: the data set. If it has `with_format` and no format yet, its NumPy format is used,
                which keeps the dtypes that lists of Python numbers would lose.
            inputs: one column (an array), several (a dict of arrays), or None: all that are no
                targets.
            targets: one column, several, or None for none.
        """
        unformatted = getattr(data, "format", {}).get("type") is None
        if hasattr(data, "with_format") and unformatted:
            data = data.with_format("numpy")
        self._data = data
        self._inputs = inputs
        self._targets = targets
        _require_samples(len(data))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._data)

    def gather(self, indices: Indices) -> Parts:
        """The chosen columns of the samples at `indices`."""
        batch = self._data[indices.tolist()]
        if not isinstance(batch, Mapping):
            raise DataError(
                f"{type(self._data).__name__}[[...]]: expected a dict of columns, "
                f"got {type(batch).__name__}."
            )
        inputs = self._inputs
        if inputs is None:
            used = [self._targets] if isinstance(self._targets, str) else (self._targets or ())
            inputs = [name for name in batch if name not in used]
        targets = None if self._targets is None else _columns(batch, self._targets)
        return _columns(batch, inputs), targets


def _columns(batch: Mapping[str, Any], names: str | Sequence[str]) -> Any:
    if not isinstance(names, str):
        return {name: _columns(batch, name) for name in names}
    if names not in batch:
        raise DataError(f"no column {names!r} in the data set. Available: {', '.join(batch)}.")
    values = batch[names]
    if isinstance(values, list):
        return _stacked([as_array(value, names) for value in values], range(len(values)), names)
    return as_array(values, names)


class MapStyle:
    """A data set with `__len__` and `__getitem__(int)`, as torch's map-style ones are.

    A sample is (inputs, targets), (inputs, targets, sample weight) or inputs alone; each an array, a number,
    or a tuple or dict of them. `__getitems__(list)` is used where there is one.
    """

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        """Takes the data set.

        Args:
            data: the data set; not a loader that already makes batches.
            collate: makes a batch of a list of samples; by default leaves of equal shape are stacked.
        """
        self._data = data
        self._collate = collate
        _require_samples(len(data))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._data)

    def gather(self, indices: Indices) -> Parts:
        """Fetches the samples one by one (or together by `__getitems__`) and stacks them."""
        wanted = indices.tolist()
        if hasattr(self._data, "__getitems__"):
            samples = self._data.__getitems__(wanted)
        else:
            samples = [self._data[index] for index in wanted]
        if self._collate is not None:
            return as_parts(self._collate(samples), "what collate_fn made")
        pairs = [as_parts(sample, f"sample {i}") for sample, i in zip(samples, wanted, strict=True)]
        inputs = _collated([pair[0] for pair in pairs], wanted, "inputs")
        if pairs[0][1] is None:
            return inputs, None
        return inputs, _collated([pair[1] for pair in pairs], wanted, "targets")


def _collated(samples: list[Any], indices: Sequence[int], name: str) -> Any:
    """Stacks equal leaves of samples of equal structure."""
    first = samples[0]
    if isinstance(first, tuple):
        parts = zip(*samples, strict=True)
        found = (_collated(list(part), indices, f"{name}[{i}]") for i, part in enumerate(parts))
        return same_kind(first, found)
    if isinstance(first, Mapping):
        return {k: _collated([s[k] for s in samples], indices, f"{name}[{k!r}]") for k in first}
    values = [as_array(s, f"{name} of sample {i}") for s, i in zip(samples, indices, strict=True)]
    return _stacked(values, indices, name)


def _stacked(values: list[Array], indices: Sequence[int], name: str) -> Array:
    for value, index in zip(values, indices, strict=True):
        if value.shape != values[0].shape:
            raise DataError(
                f"{name}: expected samples of one shape, got {values[0].shape} for sample "
                f"{indices[0]} and {value.shape} for sample {index}. Pad or crop them to one shape."
            )
    return np.stack(values)


def _require_samples(length: int) -> None:
    if length < 1:
        raise DataError("the data set is empty: expected at least one sample.")


def stream(batches: Any, samples: int | None = None) -> BatchStream:
    """A source of batches that an iterable gives anew in every epoch, in an order of its own.

    Args:
        batches: a loader, a `tf.data.Dataset`, a generator function; each batch is (inputs, targets) or
            inputs alone.
        samples: in an epoch. When left out, every process reads the stream through once to count them.

    Raises:
        DataError: it can be read only once, or gives no batches.
    """
    read = streams.reader(batches)
    if read is None:
        raise DataError(_not_accepted(batches))
    return BatchStream(read, samples)


def as_source(value: Any) -> Source | ShardedStream | BatchStream:
    """Makes a source of anything that can be one.

    A tuple or list at the top is (inputs, targets) or (inputs,); a dict is named inputs without
    targets; `arrays(inputs=..., targets=...)` says anything else. Of a torch `DataLoader` over samples by
    position, the data set and its `collate_fn` are used: order and batches are the spec's.

    Raises:
        DataError: nothing fits; lists what is accepted.
    """
    if isinstance(value, tuple | list):
        return ArraySource(*as_parts(value, "data"))
    if isinstance(value, Mapping) or hasattr(value, "__array__") or hasattr(value, "numpy"):
        return ArraySource(value)  # before Source: tensors have a gather of their own
    if isinstance(value, Source | ShardedStream | BatchStream):
        return value
    if streams.is_loader(value) and streams.loads_by_position(value):
        return _loaded(value)
    if streams.reader(value) is not None:
        return stream(value)
    by_position = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if by_position and not isinstance(value, str | type):
        by_column = hasattr(value, "column_names") or hasattr(value, "features")
        return BatchIndexed(value) if by_column else MapStyle(value)
    raise DataError(_not_accepted(value))


def _loaded(loader: Any) -> Source:
    """The samples of a loader; whole batches of them at once where it only stacks tensors."""
    tensors = getattr(loader.dataset, "tensors", None)
    stacks = getattr(loader.collate_fn, "__name__", "") == "default_collate"
    if stacks and isinstance(tensors, tuple) and len(tensors) in (1, 2, 3):
        return ArraySource(*as_parts(tensors, "data"))
    return MapStyle(loader.dataset, loader.collate_fn)


def _not_accepted(value: Any) -> str:
    return f"data: got {type(value).__name__}, which is not a data set. Accepted: {_ACCEPTED}."
