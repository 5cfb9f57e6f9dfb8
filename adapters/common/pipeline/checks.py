"""What is refused of models in stages, whichever framework computes them; imports no framework."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isotrain.plugin import SpecError, UnsupportedError

MASK_AT_SPLIT = (
    "pipeline: a mask would have to go over a cut. Cut where there is none, by the option `cut`."
)
MASKED_LOSS = (
    "loss: it masks, ignores or weighs targets, whose number all replicas must know before the"
    " first backward pass; strategy pipeline does not tell it. Use data-parallel."
)


def require_built(late: Sequence[str]) -> None:
    """Refuses metrics that make their sums by the first samples they see.

    Args:
        late: Their names.

    Raises:
        UnsupportedError: There are some.
    """
    if late:
        raise UnsupportedError(
            f"strategy pipeline: metrics: {', '.join(late)} has no sums before it sees samples; only the"
            " last stage does. Leave it out."
        )


def require_no_shared_weights(variables: Sequence[Iterable[tuple[str, int]]]) -> None:
    """Refuses layers whose weights would be on several stages.

    Args:
        variables: Of each chunk: the layer, and the identity of a variable.

    Raises:
        UnsupportedError: There is one.
    """
    home: dict[int, int] = {}
    for number, own in enumerate(variables):
        for layer, identity in own:
            if home.setdefault(identity, number) != number:
                raise UnsupportedError(
                    f"pipeline: the layer {layer} is called on both sides of a cut, and its"
                    " weights would be on two stages. Cut elsewhere, by the option `cut`."
                )


def chunk_bounds(names: Sequence[str], first: Sequence[str], chunks: int) -> list[int]:
    """Where chunks begin, and the end of all, by the names of the layers with which they begin.

    Raises:
        SpecError: There are no such layers, or not as many chunks.
    """
    for name in first:
        if name not in names:
            raise SpecError(f"pipeline: cut at {name!r}; the layers are {', '.join(names)}.")
    if len(first) + 1 != chunks:
        raise SpecError(f"pipeline: {len(first) + 1} chunks by `cut`; expected {chunks}.")
    return [0, *sorted(names.index(name) for name in first), len(names)]


def matching_names(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that patterns fit, in the order of these; of what is inside of such a module, none.

    Args:
        names: Of a model's modules, in its order.
        patterns: `*` stands for any text.

    Raises:
        SpecError: A pattern fits no name.
    """
    found: list[str] = []
    for pattern in patterns:
        fitting = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            raise SpecError(
                f"pipeline: modules: {pattern!r} fits none of the model's, which are {', '.join(names)}."
            )
        inside = tuple(f"{name}." for name in fitting)
        found += [name for name in fitting if not name.startswith(inside)]
    return found


def local_weight_indices(
    stage_of: Mapping[int, int], trainable: Sequence[Any], stage: int
) -> list[int]:
    """The places of the trainable weights that a stage has.

    Args:
        stage_of: The stage of each, by identity.
        trainable: The framework's own variables.
        stage: Which.

    Raises:
        SpecError: There are none.
    """
    places = [place for place, each in enumerate(trainable) if stage_of.get(id(each), 0) == stage]
    if not places:
        raise SpecError(
            f"pipeline: stage {stage} has no trainable weights. Use fewer stages, or cut elsewhere, by the"
            " option `cut`."
        )
    return places
