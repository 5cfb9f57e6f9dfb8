"""State a portion after the other, so that it is never in memory twice as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

PORTION_BYTES = 2**26
"""Of state that is read at a time; a larger tensor is read by itself."""


def portions(names: Iterable[str], nbytes: Callable[[str], int]) -> Iterator[list[str]]:
    """Cuts names into portions, in their order.

    Args:
        names: Of tensors.
        nbytes: How many bytes that of a name has.
    """
    portion, filled = list[str](), 0
    for name in names:
        if portion and filled + nbytes(name) > PORTION_BYTES:
            yield portion
            portion, filled = [], 0
        portion.append(name)
        filled += nbytes(name)
    if portion:
        yield portion
