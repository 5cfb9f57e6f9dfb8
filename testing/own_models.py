"""The kit's models in a framework's own words, where it trains no portable models."""

from __future__ import annotations

from isotrain.core.contracts.adapter import Adapter


def in_words_of(adapter: Adapter | None, **names: str) -> dict[str, str]:
    """Fields of a spec that stand in the place of the portable ones.

    Args:
        adapter: Of the backend that is checked; None: any that trains portable models.
        names: For each field what it is called in the adapter's `kit_models`.
    """
    if adapter is None or adapter.kit_models is None:
        return {}
    return {field: f"{adapter.kit_models}:{name}" for field, name in names.items()}
