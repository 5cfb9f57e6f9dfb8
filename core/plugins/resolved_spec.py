"""A training spec with its plugin references resolved."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import IsotrainError, SpecError
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.spec.import_strings import is_bare_name
from isotrain.core.spec.training_spec import TrainingSpec


@dataclass(frozen=True)
class ResolvedSpec:
    """A training spec with its plugin references resolved (strategy, model). Resolution is lazy and cached.

    A plan and the run that it leads to in the same process share one, and with it the strategy instance.

    Attributes:
        spec: Training spec, as the user wrote it.
        plugins: Plugin manager that resolves names of strategies, models, backends, launchers, loggers and
            callbacks.
    """

    spec: TrainingSpec
    plugins: PluginManager

    @functools.cached_property
    def strategy(self) -> Strategy:
        """Strategy instance with the spec's options."""
        return self.plugins.strategy(self.spec.strategy.name, self.spec.strategy.options)

    @functools.cached_property
    def spec_with_model(self) -> TrainingSpec:
        """The spec with the name of a registered model replaced by what is registered.

        Raises:
            SpecError: No model of that name is registered.
        """
        model = self.spec.model
        if not is_bare_name(model):
            return self.spec
        try:
            return self.spec.model_copy(update={"model": self.plugins.model(model)})
        except IsotrainError as error:
            raise SpecError(
                f'model: {error} Reference an unregistered model as "package.module:name" or'
                ' "path/to/file.py:name".'
            ) from error

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """The spec's callbacks, with names replaced by what is registered.

        Raises:
            IsotrainError: No callback of such a name is registered.
        """
        return tuple(
            self.plugins.callback(each) if is_bare_name(each) else each
            for each in self.spec.callbacks
        )
