"""Conversion of samples to NumPy arrays, and the source of arrays in memory or memory-mapped."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from isotrain.core.data.pytree import Weighted, joined, map_tree, part_leaves, unweighted
from isotrain.core.errors import DataError

if TYPE_CHECKING:
    from isotrain.core.data.order.order import MakeOrder
    from isotrain.core.data.sampler import Indices

Array = NDArray[Any]
InputsAndTargets = tuple[Any, Any]
"""(inputs, targets): each an array, or a tuple or dict of them; targets may be None."""
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]
"""Function that makes an array, not initialised, of a shape and dtype."""
ALLOCATE: ContextVar[Allocate] = ContextVar("allocate", default=np.empty)
"""Function that makes the arrays of which batches are collated."""


@contextlib.contextmanager
def allocating(allocate: Allocate) -> Iterator[None]:
    """Context in which a function makes the arrays of which batches are collated."""
    token = ALLOCATE.set(allocate)
    try:
        yield
    finally:
        ALLOCATE.reset(token)


def as_array(value: Any, name: str = "data") -> Array:
    """Converts to a NumPy array of numbers, booleans or text, of any shape; tensors by their `numpy()`.

    Raises:
        DataError: It cannot be converted, is ragged, or holds bytes, objects, complex numbers or masked
            values.
    """
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
        converted = value.numpy() if hasattr(value, "numpy") else value
        array = converted if isinstance(converted, np.ndarray) else np.asarray(converted)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name}: expected an array of numbers, received {type(value).__name__}: {error}"
        ) from error
    if np.ma.is_masked(array):
        raise DataError(
            f"{name}: expected an array without masked values, received a masked array. Fill them, such as by"
            " `.filled(0)`, and give the mask as a further input or as sample weights."
        )
    if array.dtype.kind not in "biufU":
        raise DataError(
            f"{name}: expected numbers, booleans or text, received dtype {array.dtype}. Decode bytes to text"
            " or arrays, encode times as numbers, give complex numbers as two real ones, pad samples to one"
            " shape first, or choose other columns. A `collate` function gets samples as they are."
        )
    return array


def as_inputs_and_targets(value: Any, name: str) -> InputsAndTargets:
    """One sample or batch as (inputs, targets); targets are None where only inputs are given.

    With sample weights, the third of three, targets become `Weighted`. A list of arrays or tensors becomes a
    tuple.

    Raises:
        DataError: It is a tuple or list of another length.
    """
    if isinstance(value, tuple | list):
        if len(value) not in (1, 2, 3):
            raise DataError(
                f"{name}: expected (inputs, targets) or (inputs, targets, sample weights), received a"
                f" {type(value).__name__} of {len(value)}. Nest several inputs in a tuple: ((a, b), targets)."
            )
        inputs, *rest = map(_as_tuples, value)
        return inputs, Weighted(*rest) if len(rest) == 2 else next(iter(rest), None)
    return value, None


def _as_tuples(tree: Any) -> Any:
    """Converts lists of arrays to tuples, the nodes of data pytrees."""
    if isinstance(tree, list) and tree and hasattr(tree[0], "shape"):
        return tuple(map(_as_tuples, tree))
    return tree


def require_equal_rows(parts: InputsAndTargets) -> int:
    """The number of samples, equal for all arrays; may be 0.

    Raises:
        DataError: Lengths differ, or an array is a scalar.
    """
    arrays = [*part_leaves(parts)]
    for name, array in arrays:
        if array.ndim == 0:
            raise DataError(
                f"{name}: expected an array with one row per sample, received a scalar."
            )
    lengths = {name: len(array) for name, array in arrays}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DataError(f"expected arrays with equally many samples, received: {listed}.")
    return next(iter(lengths.values()), 0)


Read = Callable[["Indices"], Any]
"""A function from sample indices (int64 [batch]) to the rows [batch, ...] of an array, or of a pytree."""


def _any_rows(array: Array) -> Read:
    """The fastest function that copies rows [batch, ...] of `array` at any indices."""
    plain = array.view(np.ndarray)
    if plain.flags.c_contiguous and plain.flags.aligned:
        return lambda indices: plain.take(indices, 0)
    return lambda indices: plain[indices]  # take would first copy the whole array


def _rows_in_order(array: Array) -> Read:
    """A function like `_any_rows` for consecutive indices; a copy too, for models may change [batch, ...]."""
    plain = array.view(np.ndarray)
    return lambda indices: plain[indices[0] : indices[-1] + 1].copy()


def _is_whole_map(array: Array) -> bool:
    """Whether an array of any shape is a read-only or shared memory map itself, not a view of one."""
    return (
        isinstance(array, np.memmap)
        and isinstance(array.base, mmap.mmap)
        and array.filename is not None
        and array.mode in ("r", "r+")
    )


@dataclass(frozen=True, slots=True)
class _MemmapRecipe:
    """Pickled in place of a memory-mapped array: how another process maps the same file."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    order: str

    @classmethod
    def of(cls, array: Any) -> Any:
        """The recipe of a memory-mapped array; anything else is returned unchanged."""
        if not _is_whole_map(array):
            return array
        order = "C" if array.flags.c_contiguous else "F"
        return cls(os.fspath(array.filename), array.dtype, array.shape, array.offset, order)

    def open(self) -> Array:
        """Maps the file, read-only, as an array of the recipe's shape and dtype."""
        order = cast("Any", self.order)
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape, order)


def _unpickled(parts: InputsAndTargets) -> ArraySource:
    """Rebuilds a source from its pickled form."""
    inputs, targets = map_tree(lambda x: x.open() if isinstance(x, _MemmapRecipe) else x, parts)
    return ArraySource(inputs, targets)


class ArraySource:
    """A source of arrays in memory or memory-mapped; when pickled, memory maps are mapped again.

    Attributes:
        inputs: An array, or a tuple or dict of arrays, each of shape [samples, ...].
        targets: As `inputs`, or None.
        order: Order of the data's own; None for that of the spec.
    """

    order: MakeOrder | None = None

    def __init__(self, inputs: Any, targets: Any = None) -> None:
        """Keeps arrays or tensors, or tuples and dicts of them, of shape [samples, ...]; copies nothing."""
        self.inputs = as_arrays(inputs, "inputs")
        self.targets = None if targets is None else as_arrays(targets, "targets")
        self._size = require_equal_rows((self.inputs, self.targets))
        if not self._size:
            raise DataError("the data set is empty: expected at least one sample.")
        self._gather = reader(self)

    def __len__(self) -> int:
        """Number of samples."""
        return self._size

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles memory-mapped arrays as file, offset and shape; arrays in memory by value."""
        recipe = _MemmapRecipe.of
        return _unpickled, ((map_tree(recipe, self.inputs), map_tree(recipe, self.targets)),)

    def gather(self, indices: Indices) -> InputsAndTargets:
        """Copies of the samples at `indices`, int64 [batch]; arrays of shape [batch, ...]."""
        return self._gather(indices)

    def column(self, name: str) -> Any:
        """The array `inputs` or `targets`, or one by its name in a dict of these; None if there is none."""
        targets, weights = unweighted(self.targets)
        columns = {"inputs": self.inputs, "targets": targets, "weights": weights}
        for part in (self.inputs, targets):
            columns |= part if isinstance(part, Mapping) else {}
        array = columns.get(name)
        return array if isinstance(array, np.ndarray) else None

    @property
    def in_memory(self) -> bool:
        """Whether no array is memory-mapped, so that gathering never waits for a disk."""
        leaves = part_leaves((self.inputs, self.targets))
        return not any(isinstance(array, np.memmap) for _, array in leaves)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample over all arrays."""
        leaves = part_leaves((self.inputs, self.targets))
        return sum(int(array.nbytes) for _, array in leaves) // self._size


def reader(
    source: ArraySource, to_device: Callable[[Array], Any] | None = None, *, in_order: bool = False
) -> Callable[[Indices], InputsAndTargets]:
    """Makes a function that copies the samples at given indices, int64 [batch]."""
    rows_of = _rows_in_order if in_order else _any_rows

    def read(array: Array) -> Read:
        take = rows_of(array)
        return take if to_device is None else lambda indices: to_device(take(indices))

    inputs = joined(map_tree(read, source.inputs))
    if source.targets is None:
        return lambda indices: (inputs(indices), None)
    targets = joined(map_tree(read, source.targets))
    return lambda indices: (inputs(indices), targets(indices))


def as_arrays(tree: Any, name: str) -> Any:
    """Converts every leaf to an array in native byte order; errors name the leaf's path."""
    if isinstance(tree, Weighted):
        return Weighted(as_arrays(tree.targets, name), as_arrays(tree.weights, "sample weights"))
    if isinstance(tree, tuple):
        return tuple(as_arrays(part, f"{name}[{i}]") for i, part in enumerate(tree))
    if isinstance(tree, Mapping):
        return {str(key): as_arrays(part, f"{name}[{key!r}]") for key, part in tree.items()}
    array = as_array(tree, name)
    if array.dtype.isnative:
        return array
    if isinstance(array, np.memmap):
        raise DataError(
            f"{name}: the file has the other byte order ({array.dtype}); convert it once."
        )
    return array.astype(array.dtype.newbyteorder("="))


def arrays(inputs: Any, targets: Any = None) -> ArraySource:
    """A source of arrays: `inputs` and `targets` are arrays [samples, ...], or tuples or dicts of them."""
    return ArraySource(inputs, targets)
