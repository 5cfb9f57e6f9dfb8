"""What a plan says of a model and a loss once they are there; imports no framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isotrain.adapters.common import callables
from isotrain.plugin import LayerTrait, TrainingSpec, Trait, import_strings

OWN_DENOMINATOR = (
    "loss: targets do not count alike (masks, classes that are ignored or weighed); what counts in each slice"
    " is exchanged in every step, so that the mean is that of the whole global batch. In local steps, and for"
    " the workers of a parameter server, each slice has the mean of its own"
)


def notes(spec: TrainingSpec, framework: str, traits: Sequence[LayerTrait]) -> list[str]:
    """Says what is not called, and in which order the arguments of a person's functions are given.

    Args:
        spec: What is trained.
        framework: Whose entries of the spec are taken.
        traits: Of the model.
    """
    return [*_of_model(traits), *_of_functions(spec, framework)]


def _of_model(traits: Sequence[LayerTrait]) -> Iterator[str]:
    own = [trait for trait in traits if trait.trait == Trait.CUSTOM_TRAINING]
    if own:
        yield (
            f"model: {', '.join(trait.layer for trait in own)} of {own[0].kind} is not called: the spec's"
            " loss (or objective), optimizer and metrics train and measure the model"
        )


def _of_functions(spec: TrainingSpec, framework: str) -> Iterator[str]:
    given = [("loss", loss) for loss in spec.losses(framework).values()]
    for field, own in [*given, *(("metrics", metric) for metric in spec.metrics)]:
        order = (
            callables.argument_order_of(import_strings.resolve(own.name))
            if own.is_reference
            else None
        )
        if order := own.order or order:
            targets_first = order == "targets-first"
            words = "(targets, predictions)" if targets_first else "(predictions, targets)"
            yield f"{field}: {own.label!r} is called with {words}"
