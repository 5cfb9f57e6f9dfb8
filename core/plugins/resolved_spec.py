"""What takes part in a run."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import IsotrainError, SpecError
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.spec.import_strings import is_bare_name
from isotrain.core.spec.training_spec import TrainingSpec


@dataclass(frozen=True)
class ResolvedSpec:
    """A spec with what its names stand for: each is looked up and made once, when it is first asked for.

    What is planned in a process and then runs in it shares one.

    Attributes:
        spec: What is trained, as it was given.
        host: Knows the backends, strategies, launchers, models and loggers.
    """

    spec: TrainingSpec
    host: PluginManager

    @functools.cached_property
    def strategy(self) -> Strategy:
        """The strategy with its options; it knows of the plan that it was told of last."""
        return self.host.strategy(self.spec.strategy.name, self.spec.strategy.options)

    @functools.cached_property
    def spec_with_model(self) -> TrainingSpec:
        """The spec with what is registered in the place of the name of a model.

        Raises:
            SpecError: No model of that name is registered.
        """
        given = self.spec.model
        if not is_bare_name(given):
            return self.spec
        try:
            return self.spec.model_copy(update={"model": self.host.model(given)})
        except IsotrainError as error:
            raise SpecError(
                f"model: {error} A model that no plugin registers is given as"
                ' "package.module:name" or "path/to/file.py:name".'
            ) from error
