"""The backend of a run: the one requested, the spec's, or the first that is available here."""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.capabilities import Availability
from isotrain.core.contracts.plan import split_backend
from isotrain.core.errors import BackendUnavailableError
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.training_spec import TrainingSpec

AUTO = "auto"
"""Name for the first backend that is available here and trains the spec's model."""


def resolve_backend(requested: str | None, resolved_spec: ResolvedSpec) -> str:
    """The backend of a run, `NAME` or `NAME:COLLECTIVE`; imports no framework.

    Args:
        requested: `NAME`, `NAME:COLLECTIVE` or `auto`; None: the spec's, or `auto` if it names none.
        resolved_spec: Spec with its plugins.

    Raises:
        BackendUnavailableError: With `auto`, no backend that trains the spec's model is available here.
    """
    backend = requested or resolved_spec.spec.backend or AUTO
    if backend != AUTO:
        return backend
    backends = backends_for(resolved_spec.spec_with_model, resolved_spec.plugins)
    for name, availability in backends.items():
        if availability.available:
            return name
    reasons = [f"{name}: {each.reason} ({each.hint})" for name, each in backends.items()]
    raise BackendUnavailableError(
        "no backend that trains this model can be used here. "
        + ("; ".join(reasons) or "None is registered for its frameworks")
        + "."
    )


def backends_for(spec: TrainingSpec, host: PluginManager) -> dict[str, Availability]:
    """Availability by name of the backends that train the spec's model, in order of registration.

    These are the backends of its frameworks, or all that train portable models. A backend with models of its
    own counts where the spec names it. None that cannot be loaded is among them.
    """
    availabilities = {}
    for name in host.backends.names():
        try:
            adapter = host.backend(name)
            if _trains(adapter, spec):
                availabilities[name] = adapter.availability()
        except Exception:  # a broken plugin must not hide the others; `isotrain backends` shows it
            continue
    return availabilities


def _trains(adapter: Adapter, spec: TrainingSpec) -> bool:
    if isinstance(spec.model, Mapping):
        return adapter.framework in spec.model
    is_named = spec.backend is not None and split_backend(spec.backend)[0] == adapter.name
    return is_named or adapter.conformance_models is None
