"""The kit's models in a framework's own words, where it trains no portable models."""

from __future__ import annotations

from isotrain.core.contracts.adapter import Adapter


def kit_model_fields(adapter: Adapter | None, **names: str) -> dict[str, str]:
    """Fields of a spec that stand in the place of the portable ones.

    Args:
        adapter: Of the backend that is checked; None: any that trains portable models.
        names: For each field what it is called in the adapter's `conformance_models`.
    """
    if adapter is None or adapter.conformance_models is None:
        return {}
    return {field: f"{adapter.conformance_models}:{name}" for field, name in names.items()}
