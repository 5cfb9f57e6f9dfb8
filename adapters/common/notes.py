"""Notes of a plan on a model and its losses, once these are built; imports no framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isotrain.adapters.common import callables
from isotrain.plugin import LayerTrait, TrainingSpec, Trait, import_strings

OWN_DENOMINATOR = (
    "loss: targets have different weights (masks, classes that are ignored or weighted); the loss"
    " denominators are all-reduced in every step, so that the mean is that of the global batch. In local"
    " steps, and on the workers of a parameter-server run, gradients are those of the local batch's mean"
)


def notes(spec: TrainingSpec, framework: str, traits: Sequence[LayerTrait]) -> list[str]:
    """Notes on unused methods of the model, and on the argument order of custom functions.

    Args:
        spec: Training spec.
        framework: Framework whose entries of the spec apply.
        traits: Traits of the model's layers.
    """
    return [*_model_notes(traits), *_argument_order_notes(spec, framework)]


def _model_notes(traits: Sequence[LayerTrait]) -> Iterator[str]:
    custom_training = [trait for trait in traits if trait.trait == Trait.CUSTOM_TRAINING]
    if custom_training:
        yield (
            f"model: {', '.join(trait.layer for trait in custom_training)} of"
            f" {custom_training[0].kind} is not called: the spec's"
            " loss (or objective), optimizer and metrics train and measure the model"
        )


def _argument_order_notes(spec: TrainingSpec, framework: str) -> Iterator[str]:
    losses = [("loss", loss) for loss in spec.losses(framework).values()]
    for field, component in [*losses, *(("metrics", metric) for metric in spec.metrics)]:
        order = (
            callables.argument_order_of(import_strings.resolve(component.name))
            if component.is_reference
            else None
        )
        if order := component.order or order:
            targets_first = order == "targets-first"
            arguments = "(targets, predictions)" if targets_first else "(predictions, targets)"
            yield f"{field}: {component.label!r} is called with {arguments}"
