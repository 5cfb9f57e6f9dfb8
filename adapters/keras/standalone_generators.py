"""Keras seed generators outside of the model's layers.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import keras

from isotrain.adapters.common import spec_components as choices
from isotrain.adapters.keras import private as keras_private
from isotrain.plugin import TrainingSpec, import_strings

UNSEEDED = "keras"
"""Name of the global seed generator, which Keras draws from when no seed is passed."""


def standalone_generators(
    spec: TrainingSpec, framework: str, model: Any
) -> dict[str, keras.random.SeedGenerator]:
    """Seed generators by name: the global one, and those that the spec's functions use.

    The global generator is replaced by one seeded with the spec's seed. Functions' generators are found in
    their globals and closures. Called after the model is built.

    Args:
        spec: Training spec, for the seed and the functions.
        framework: Framework whose functions are used, where the spec has one per framework.
        model: Built model; generators whose state is among its weights are left out.
    """
    generators = {UNSEEDED: keras.random.SeedGenerator(spec.seed & 0x7FFFFFFF)}
    keras_private.set_default_generator(generators[UNSEEDED])
    for function in user_functions(spec, framework):
        for name, value in _referred_to(function).items():
            if isinstance(value, keras.random.SeedGenerator):
                generators.setdefault(f"keras-{name}", value)
    model_states = {id(variable) for variable in getattr(model, "non_trainable_variables", ())}
    return {name: each for name, each in generators.items() if id(each.state) not in model_states}


def user_functions(spec: TrainingSpec, framework: str) -> Iterator[Any]:
    """The user's own objective, losses and metrics, of those that refer to functions."""
    if spec.objective is not None:
        yield choices.resolve_for_framework(spec.objective, framework, "objective")
    for component in (*spec.losses(framework).values(), *spec.metrics):
        if component.is_reference:
            yield import_strings.resolve(component.name)


def _referred_to(function: Any) -> dict[str, Any]:
    """Globals and closure variables that a function uses, by name; an object's attributes otherwise."""
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        return {**names.globals, **names.nonlocals}
    return dict(getattr(function, "__dict__", {}))
