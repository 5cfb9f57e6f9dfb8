"""Models that a spec names as they are registered."""

from __future__ import annotations

from isotrain.core.errors import IsotrainError, SpecError
from isotrain.core.plugins.host import PluginHost
from isotrain.core.spec.training_spec import TrainingSpec


def with_named_model(spec: TrainingSpec, host: PluginHost) -> TrainingSpec:
    """The spec with what is registered in the place of the name of a model.

    Raises:
        SpecError: No model of that name is registered.
    """
    given = spec.model
    if not isinstance(given, str) or ":" in given:
        return spec
    try:
        return spec.model_copy(update={"model": host.model(given)})
    except IsotrainError as error:
        raise SpecError(
            f"model: {error} A model that no plugin registers is given as"
            ' "package.module:name" or "path/to/file.py:name".'
        ) from error
