"""Framework-specific models of the conformance kit, for backends that train no portable models."""

from __future__ import annotations

from isotrain.core.contracts.backend.adapter import Adapter


def kit_model_fields(adapter: Adapter | None, **names: str) -> dict[str, str]:
    """Spec fields that replace the portable models; none for a backend that trains those.

    Args:
        adapter: Adapter of the checked backend; None for any backend that trains portable models.
        names: Name of each field's function in the adapter's `conformance_models` module.
    """
    if adapter is None or adapter.conformance_models is None:
        return {}
    return {field: f"{adapter.conformance_models}:{name}" for field, name in names.items()}
