"""Checks of models that are split into pipeline stages; imports no framework."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isotrain.plugin import SpecError, UnsupportedError

MASK_AT_SPLIT = (
    "pipeline: a mask would be sent over a cut. Cut where there is none, by the option `cut`."
)
MASKED_LOSS = (
    "loss: it masks, ignores or weights targets, whose number all replicas must know before the"
    " first backward pass; strategy pipeline does not support it. Use data-parallel."
)


def require_built(late: Sequence[str]) -> None:
    """Refuses metrics that create their accumulators at their first samples.

    Args:
        late: Names of such metrics.

    Raises:
        UnsupportedError: There are some.
    """
    if late:
        raise UnsupportedError(
            f"strategy pipeline: metrics: {', '.join(late)} creates its accumulators at the first samples,"
            " which only the last stage sees. Leave it out."
        )


def require_no_shared_weights(variables: Sequence[Iterable[tuple[str, int]]]) -> None:
    """Refuses layers whose weights would be on several stages.

    Args:
        variables: Per chunk, pairs of a layer's name and the identity of a variable.

    Raises:
        UnsupportedError: A variable is in several chunks.
    """
    chunk_of: dict[int, int] = {}
    for chunk, chunk_variables in enumerate(variables):
        for layer, identity in chunk_variables:
            if chunk_of.setdefault(identity, chunk) != chunk:
                raise UnsupportedError(
                    f"pipeline: the layer {layer} is called on both sides of a cut, and its"
                    " weights would be on two stages. Cut elsewhere, by the option `cut`."
                )


def chunk_bounds(names: Sequence[str], first: Sequence[str], chunks: int) -> list[int]:
    """Indices of the layers at which chunks begin, and the number of layers.

    Args:
        names: Names of the layers, in order.
        first: Names of the layers at which chunks begin, except the first chunk.
        chunks: Number of chunks.

    Raises:
        SpecError: There are no such layers, or another number of chunks.
    """
    for name in first:
        if name not in names:
            raise SpecError(f"pipeline: cut at {name!r}; the layers are {', '.join(names)}.")
    if len(first) + 1 != chunks:
        raise SpecError(f"pipeline: {len(first) + 1} chunks by `cut`; expected {chunks}.")
    return [0, *sorted(names.index(name) for name in first), len(names)]


def matching_names(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Names that match the patterns, in the order of these; without submodules of a match.

    Args:
        names: Names of a model's modules, in its order.
        patterns: Names in which `*` stands for any text.

    Raises:
        SpecError: A pattern matches no name.
    """
    matches: list[str] = []
    for pattern in patterns:
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise SpecError(
                f"pipeline: modules: {pattern!r} matches no module; available: {', '.join(names)}."
            )
        prefixes = tuple(f"{name}." for name in matching)
        matches += [name for name in matching if not name.startswith(prefixes)]
    return matches


def local_weight_indices(
    stage_of: Mapping[int, int], trainable: Sequence[Any], stage: int
) -> list[int]:
    """Indices of the trainable weights of a stage.

    Args:
        stage_of: Stage of each weight, by identity.
        trainable: Trainable variables of the framework.
        stage: The stage.

    Raises:
        SpecError: The stage has none.
    """
    indices = [
        index for index, weight in enumerate(trainable) if stage_of.get(id(weight), 0) == stage
    ]
    if not indices:
        raise SpecError(
            f"pipeline: stage {stage} has no trainable weights. Use fewer stages, or cut elsewhere, by the"
            " option `cut`."
        )
    return indices
