"""Which slot is whose: by the names that an optimizer may have given it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def match_names(
    candidates: Mapping[str, Sequence[str]], known: Collection[str]
) -> dict[str, str] | None:
    """Tells whose each name is, where it may be that of several weights.

    Args:
        candidates: What one slot of each weight may be called, the likeliest first.
        known: The names that there are.

    Returns:
        What that of each weight is called, or will be; None where that is open.
    """
    found: dict[str, str] = {}
    left = {
        weight: [name for name in names if name in known] or list(names[:1])
        for weight, names in candidates.items()
    }
    while sure := {weight: names[0] for weight, names in left.items() if len(names) == 1}:
        found |= sure
        left = {
            weight: [name for name in names if name not in sure.values()]
            for weight, names in left.items()
            if weight not in sure
        }
    return None if left or len(set(found.values())) < len(found) else found
