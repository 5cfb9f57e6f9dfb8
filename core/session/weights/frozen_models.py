"""Frozen models of a spec: functions that build them, or runs that have trained them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isotrain.core.contracts.backend.frozen_model import FrozenModel
from isotrain.core.launching.run_directory.run_directory import SPEC_FILE, read_fields
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.weights.weight_readers import stored_weights
from isotrain.core.spec import import_strings
from isotrain.core.spec.stored_references import resolve_stored
from isotrain.core.spec.training_spec import TrainingSpec


def spec_with_models(resolved_spec: ResolvedSpec) -> TrainingSpec:
    """The spec for adapters, with the registered model, and each frozen model as a `FrozenModel`. Local.

    Raises:
        SpecError: A model cannot be found.
        IsotrainError: A directory is not that of a run with weights.
    """
    spec = resolved_spec.spec_with_model
    if not spec.frozen:
        return spec
    frozen = {name: _frozen(name, each, resolved_spec) for name, each in spec.frozen.items()}
    return spec.model_copy(update={"frozen": frozen})


def _frozen(name: str, source: Any, resolved_spec: ResolvedSpec) -> FrozenModel:
    """Frozen model of a reference, a table of such, or the directory of a run."""
    if not isinstance(source, str) or import_strings.syntax_problem(source) is None:
        return FrozenModel(name, source)
    fields = read_fields(Path(source), SPEC_FILE)
    model = resolve_stored("model", fields.get("model"), source, "Name a function that builds it.")
    if import_strings.is_bare_name(model):
        model = resolved_spec.plugins.model(model)
    return FrozenModel(name, model, fields.get("model_args") or {}, stored_weights(source))
