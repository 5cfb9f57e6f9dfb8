"""Sources of several data sets: their samples one by one, or joined to rows of one sample of each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from isotrain.core.data.arrays import InputsAndTargets
from isotrain.core.data.order.mixing import in_turn, interleaved, joined
from isotrain.core.data.order.order import MakeOrder
from isotrain.core.data.order.samples import Columns
from isotrain.core.data.pytree import Weighted, same_kind, unweighted
from isotrain.core.data.sample_seeds import only_rows
from isotrain.core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isotrain.core.data.sampler import Indices

_MAX_COMBINATIONS = 2**62


class _Several:
    """Several data sets by name, as sources."""

    _parts: dict[str, Any]

    @property
    def collates(self) -> bool:
        """Whether slices are made one by one of single samples, since their shapes may differ."""
        return any(getattr(part, "collates", False) for part in self._parts.values())

    def changed(self, change: Callable[[Any], Any]) -> Self:
        """The same of sources that `change` makes of the data sets."""
        result = copy.copy(self)
        result._parts = {name: change(part) for name, part in self._parts.items()}
        return result


class Mixture(_Several):
    """A source of the samples of several data sets, one after the other by position.

    Attributes:
        order: Order of the data's own, by ratios or in turn; None for that of the spec.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        ratios: Sequence[float] | None = None,
        samples: int | None = None,
        *,
        is_in_turn: bool = False,
    ) -> None:
        """Keeps the data sets, which are sources; see `isotrain.sources.mixture` for the arguments."""
        self._parts = dict(parts)
        lengths = [len(part) for part in parts.values()]
        self._starts = np.cumsum([0, *lengths])
        self.order: MakeOrder | None = None
        if is_in_turn:
            self.order = partial(in_turn, lengths=lengths)
        elif ratios is not None:
            ranges = [
                (length, partial(np.add, start))
                for length, start in zip(lengths, self._starts, strict=False)
            ]
            self.order = partial(interleaved, parts=ranges, ratios=ratios, samples=samples)

    def __len__(self) -> int:
        """Number of samples of all data sets."""
        return int(self._starts[-1])

    def located(self, position: int) -> tuple[Any, int]:
        """The data set of a position, and the position in it."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return [*self._parts.values()][number], position - int(self._starts[number])

    def column(self, name: str) -> Any:
        """The entries of a column that all data sets have."""
        return [entry for part in self._parts.values() for entry in Columns(part)[name]]

    def gather(self, indices: Indices) -> InputsAndTargets:
        """The samples at `indices`, int64 [batch]; arrays of shape [batch, ...]."""
        part_of = np.searchsorted(self._starts, indices, side="right") - 1
        by_part = np.argsort(part_of, kind="stable")
        gathered = []
        for number, part in enumerate(self._parts.values()):
            if len(rows := np.flatnonzero(part_of == number)):
                with only_rows(rows):
                    gathered.append(part.gather(indices[rows] - self._starts[number]))
        rows = np.empty_like(by_part)
        rows[by_part] = np.arange(len(indices))
        inputs, targets = self._concatenated(gathered, rows)
        return inputs, targets

    def _concatenated(self, trees: Sequence[Any], rows: Indices) -> Any:
        """Concatenates the leaves of trees, arrays [samples, ...], and takes rows of the result."""
        first = trees[0]
        try:
            if isinstance(first, tuple):
                columns = zip(*trees, strict=True)
                return same_kind(first, [self._concatenated(each, rows) for each in columns])
            if isinstance(first, dict):
                return {
                    name: self._concatenated([tree[name] for tree in trees], rows) for name in first
                }
            if first is None and not any(tree is not None for tree in trees):
                return None
            return np.concatenate(trees)[rows]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise DataError(
                f"sources.mixture: the samples of {', '.join(self._parts)} differ in structure or shape:"
                f" {type(error).__name__}: {error}. Mixed samples must be alike."
            ) from None


class Joined(_Several):
    """A source of rows of one sample of each of several data sets.

    Attributes:
        order: Order of the data's own: each data set in its own permutation.
    """

    def __init__(self, parts: Mapping[str, Any], rows: int) -> None:
        """Keeps the data sets; reads no sample.

        Args:
            parts: The data sets by name, as sources.
            rows: Number of rows of an epoch; data sets with fewer samples are begun again.

        Raises:
            DataError: There are too many combinations of their samples to number them.
        """
        self._parts = dict(parts)
        self._lengths = [len(part) for part in parts.values()]
        self._rows = rows
        if math.prod(self._lengths) > _MAX_COMBINATIONS:
            raise DataError(
                f"sources.joined: {' x '.join(map(str, self._lengths))} combinations of samples; expected at"
                " most 2^62. Join fewer data sets, or data sets that are joined by position already."
            )
        self.order: MakeOrder | None = partial(joined, lengths=self._lengths)

    def __len__(self) -> int:
        """Number of rows of an epoch."""
        return self._rows

    def gather(self, indices: Indices) -> InputsAndTargets:
        """The rows at `indices`, int64 [batch]: inputs and targets of each data set, by its name.

        An index below the number of rows is that sample of each data set; others are as the order's.
        """
        combinations = indices - self._rows
        inputs, targets, weights = {}, {}, {}
        for (name, part), length in zip(self._parts.items(), self._lengths, strict=True):
            positions = np.where(combinations < 0, indices, combinations) % length
            combinations = np.where(combinations < 0, combinations, combinations // length)
            inputs[name], all_targets = part.gather(positions)
            targets[name], weights[name] = unweighted(all_targets)
        targets = {name: part for name, part in targets.items() if part is not None}
        if all(part is None for part in weights.values()):
            return inputs, targets or None
        ones = np.ones(len(indices))
        return inputs, Weighted(
            targets, {name: ones if part is None else part for name, part in weights.items()}
        )
