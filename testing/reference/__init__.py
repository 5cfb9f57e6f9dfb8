"""Reference backend in NumPy: real processes that start quickly. A plugin; see `docs/testing.md`."""

from __future__ import annotations

from isotrain import hookimpl
from isotrain.plugin import BackendRegistry

isotrain_api = "1.0"


@hookimpl
def isotrain_register_backends(register: BackendRegistry) -> None:
    """Registers the backend by name; its module is imported at first use."""
    register.add("isotrain.testing.reference.adapter:Reference", name="reference")
