"""A backend for isotrain: JAX. isotrain finds this module by its entry point; no framework is imported."""

from __future__ import annotations

from isotrain.plugin import BackendRegistry, hookimpl

isotrain_api = "1.0"


@hookimpl
def isotrain_register_backends(register: BackendRegistry) -> None:
    """Registers the backend by reference, so that it is imported when it is first used."""
    register.add("isotrain_jax.adapter:JaxMesh", name="jax-mesh")
