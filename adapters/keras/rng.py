"""Keras' generators of random numbers that no layer has.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import keras

from isotrain.adapters.common import resolve as choices
from isotrain.adapters.keras import private as keras_private
from isotrain.plugin import TrainingSpec, import_strings

UNSEEDED = "keras"
"""What the generator is called by which Keras draws where it is given no seed."""


def standalone_generators(
    spec: TrainingSpec, framework: str, model: Any
) -> dict[str, keras.random.SeedGenerator]:
    """Generators by name. Called once the model is built.

    They are Keras' own, by which it draws where no seed is given, started here from the spec's seed; and
    those that the spec's functions refer to by a name, as their module's or in their closure.

    Args:
        spec: Names the functions.
        framework: Whose entries of the spec are taken.
        model: Whose own generators are not meant.
    """
    found = {UNSEEDED: keras.random.SeedGenerator(spec.seed & 0x7FFFFFFF)}
    keras_private.set_default_generator(found[UNSEEDED])
    for function in _functions(spec, framework):
        for name, value in _referred_to(function).items():
            if isinstance(value, keras.random.SeedGenerator):
                found.setdefault(f"keras-{name}", value)
    own = {id(variable) for variable in getattr(model, "non_trainable_variables", ())}
    return {name: each for name, each in found.items() if id(each.state) not in own}


def _functions(spec: TrainingSpec, framework: str) -> Iterator[Any]:
    """The person's own objective, loss and metrics."""
    if spec.objective is not None:
        yield choices.resolve_for_framework(spec.objective, framework, "objective")
    for component in (*spec.losses(framework).values(), *spec.metrics):
        if component.is_reference:
            yield import_strings.resolve(component.name)


def _referred_to(function: Any) -> dict[str, Any]:
    """What a function refers to by name; of an object, its attributes."""
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        return {**names.globals, **names.nonlocals}
    return dict(getattr(function, "__dict__", {}))
