"""A model that objectives call and that is not trained, as adapters get it in `spec.frozen`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isotrain.core.errors import SpecError, first_of

if TYPE_CHECKING:
    import numpy as np

_MAX_LISTED = 6


@dataclass(frozen=True)
class FrozenModel:
    """Function that builds a frozen model, and the weights of the run that has trained it.

    Attributes:
        name: Name of the model in the spec.
        model: Callable or import string, or a table of these by framework.
        model_args: Arguments of the callable.
        weights: Arrays by weight name; None: those that the function gives the model.
    """

    name: str
    model: Any
    model_args: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, np.ndarray] | None = None

    def load(self, variables: Mapping[str, Any], assign: Callable[[Any, np.ndarray], Any]) -> None:
        """Assigns the weights to the variables of the built model, if there are any. Local.

        Args:
            variables: Variables by weight name, each with a shape.
            assign: Function that sets a variable to an array of its shape, in its own dtype.

        Raises:
            SpecError: The run has no weight of a name, or one of another shape.
        """
        if self.weights is None:
            return
        arrays = {name: self.weights[name] for name in variables if name in self.weights}
        shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
        wrong = [n for n, shape in shapes.items() if n not in arrays or arrays[n].shape != shape]
        if wrong:
            raise SpecError(
                f"frozen.{self.name}: the run has no weights of these names and shapes, which its model has"
                f" now: {first_of(wrong, _MAX_LISTED)}. Was the model changed since the run? Name a function"
                " that builds the model and loads its weights."
            )
        for name, array in arrays.items():
            assign(variables[name], array)
