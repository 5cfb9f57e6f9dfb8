"""Registers the backend `numpy`: the reference backend, for small networks without a framework."""

from __future__ import annotations

from isotrain.plugin import BackendRegistry, hookimpl


@hookimpl
def isotrain_register_backends(register: BackendRegistry) -> None:
    """Registers the backend by reference, so that it is not imported before it is used."""
    register.add("isotrain.testing.reference.adapter:NumPy", name="numpy")
