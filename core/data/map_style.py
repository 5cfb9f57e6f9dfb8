"""Data sets that give samples by position, one by one or by a list of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.core.data.arrays import Array, InputsAndTargets, as_array, as_inputs_and_targets
from isotrain.core.data.pytree import same_kind
from isotrain.core.errors import DataError, unknown_name

if TYPE_CHECKING:
    from isotrain.core.data.sampler import Indices

_Names = str | Sequence[str] | None


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

    def gather(self, indices: Indices) -> InputsAndTargets:
        """The chosen columns of the samples at `indices`."""
        batch = self._data[indices.tolist()]
        if not isinstance(batch, Mapping):
            raise DataError(
                f"{type(self._data).__name__}[[...]]: expected a dict of columns, "
                f"got {type(batch).__name__}."
            )
        return _chosen(batch, self._inputs, self._targets, _column)


def _chosen(
    fields: Mapping[str, Any],
    inputs: _Names,
    targets: _Names,
    taken: Callable[[Any, str], Any],
) -> InputsAndTargets:
    """Which named fields are the inputs and which the targets, and what is taken of each."""
    if inputs is None:
        used = [targets] if isinstance(targets, str) else (targets or ())
        inputs = [name for name in fields if name not in used]
    return _named(fields, inputs, taken), (
        None if targets is None else _named(fields, targets, taken)
    )


def _named(
    fields: Mapping[str, Any], names: str | Sequence[str], taken: Callable[[Any, str], Any]
) -> Any:
    if not isinstance(names, str):
        return {name: _named(fields, name, taken) for name in names}
    if names not in fields:
        raise DataError(f"the data set: {unknown_name('column', names, fields)}")
    return taken(fields[names], names)


def _column(values: Any, name: str) -> Array:
    if isinstance(values, list):
        return _stacked([as_array(value, name) for value in values], range(len(values)), name)
    return as_array(values, name)


class MapStyle:
    """A data set with `__len__` and `__getitem__(int)`, as torch's map-style ones are.

    A sample is (inputs, targets), (inputs, targets, sample weight) or inputs alone; each an array, a number,
    or a tuple or dict of them; or it is a dict of all of them, of which the names of the targets are given.
    `__getitems__(list)` is used where there is one.

    Attributes:
        notes: What is not done as a loader of it would have.
    """

    def __init__(
        self,
        data: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        inputs: str | Sequence[str] | None = None,
        targets: str | Sequence[str] | None = None,
    ) -> None:
        """Takes the data set.

        Args:
            data: the data set; not a loader that already makes batches.
            collate: makes a batch of a list of samples; by default leaves of equal shape are stacked.
            inputs: of samples that are dicts, one name, several (then the inputs are a dict), or None: all
                that are no targets.
            targets: of samples that are dicts, one name, several, or None for none.
        """
        self._data = data
        self.notes: list[str] = []
        self._collate = collate
        self._names = inputs, targets
        _require_samples(len(data))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._data)

    def gather(self, indices: Indices) -> InputsAndTargets:
        """Fetches the samples one by one (or together by `__getitems__`) and stacks them."""
        wanted = indices.tolist()
        if hasattr(self._data, "__getitems__"):
            samples = self._data.__getitems__(wanted)
        else:
            samples = [self._data[index] for index in wanted]
        if self._collate is not None:
            return self._parts(self._collate(samples), "what collate_fn made")
        pairs = [
            self._parts(sample, f"sample {i}") for sample, i in zip(samples, wanted, strict=True)
        ]
        inputs = _collated([pair[0] for pair in pairs], wanted, "inputs")
        if pairs[0][1] is None:
            return inputs, None
        return inputs, _collated([pair[1] for pair in pairs], wanted, "targets")

    def _parts(self, given: Any, what: str) -> InputsAndTargets:
        """Inputs and targets of a sample or a batch."""
        if self._names == (None, None):
            return as_inputs_and_targets(given, what)
        if not isinstance(given, Mapping):
            raise DataError(
                f"{what}: expected a dict with the names that are given, got {type(given).__name__}."
            )
        return _chosen(given, *self._names, lambda value, name: value)


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
