"""Nested tuples and dicts, as inputs, targets and predictions have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Weighted(NamedTuple):
    """Targets that do not count alike: what data that give (inputs, targets, sample weights) have as targets.

    Attributes:
        targets: As they would be without weights.
        weights: By which the losses of the samples are multiplied: of shape [samples], or of the losses'; one
            array for all outputs, or one for each, in a tuple or dict.
    """

    targets: Any
    weights: Any


def unweighted(targets: Any) -> tuple[Any, Any]:
    """Targets, and their sample weights or None."""
    return targets if isinstance(targets, Weighted) else (targets, None)


def same_kind(tree: tuple[Any, ...], parts: Iterable[Any]) -> tuple[Any, ...]:
    """Parts in the form of the tuple that they were made of."""
    return Weighted(*parts) if isinstance(tree, Weighted) else tuple(parts)


def map_tree(function: Callable[[Any], Any], tree: Any, *, lists: bool = False) -> Any:
    """Applies `function` to every leaf of nested tuples and dicts, and keeps their structure.

    Args:
        function: Of a leaf.
        tree: Of leaves.
        lists: Whether lists nest too, as they do in what models give; in data they are leaves.
    """
    if isinstance(tree, tuple):
        return same_kind(tree, (map_tree(function, part, lists=lists) for part in tree))
    if isinstance(tree, Mapping):
        return {name: map_tree(function, part, lists=lists) for name, part in tree.items()}
    if lists and isinstance(tree, list):
        return [map_tree(function, part, lists=lists) for part in tree]
    return function(tree)


def joined(functions: Any) -> Callable[[Any], Any]:
    """Makes one function of a tree of functions of the same argument: it gives the tree of what they give."""
    if isinstance(functions, tuple):
        parts = [joined(part) for part in functions]
        return lambda given: same_kind(functions, [part(given) for part in parts])
    if isinstance(functions, Mapping):
        named = {name: joined(part) for name, part in functions.items()}
        return lambda given: {name: part(given) for name, part in named.items()}
    made: Callable[[Any], Any] = functions
    return made


def leaves(tree: Any, name: str, *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested tuples and dicts with its path, such as `inputs['image']`.

    Args:
        tree: Of leaves.
        name: Of the tree.
        lists: As for `map_tree`.
    """
    if isinstance(tree, Weighted):
        yield from leaves(tree.targets, name)
        yield from leaves(tree.weights, "sample weights")
    elif isinstance(tree, tuple) or (lists and isinstance(tree, list)):
        for position, part in enumerate(tree):
            yield from leaves(part, f"{name}[{position}]", lists=lists)
    elif isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from leaves(part, f"{name}[{key!r}]", lists=lists)
    else:
        yield name, tree
