"""Pytrees: nested tuples and dicts of arrays, as inputs, targets and predictions are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Weighted(NamedTuple):
    """Targets with sample weights, for data of (inputs, targets, sample weights).

    Attributes:
        targets: The targets, an array [samples, ...] or a pytree of arrays.
        weights: Factors of the samples' losses, shape [samples] or that of the losses; one array for all
            outputs, or a tuple or dict with one per output.
    """

    targets: Any
    weights: Any


def unweighted(targets: Any) -> tuple[Any, Any]:
    """Splits targets from their sample weights; these are None without any."""
    return targets if isinstance(targets, Weighted) else (targets, None)


def same_kind(tree: tuple[Any, ...], parts: Iterable[Any]) -> tuple[Any, ...]:
    """The parts as a `Weighted` if `tree` is one, else as a tuple."""
    return Weighted(*parts) if isinstance(tree, Weighted) else tuple(parts)


def map_tree(function: Callable[[Any], Any], tree: Any, *, lists: bool = False) -> Any:
    """Applies `function` to every leaf of nested tuples and dicts, and keeps their structure.

    Args:
        function: Function from a leaf to a leaf.
        tree: The pytree.
        lists: Whether lists are nodes too, as in model outputs; in data they are leaves.
    """
    if isinstance(tree, tuple):
        return same_kind(tree, (map_tree(function, part, lists=lists) for part in tree))
    if isinstance(tree, Mapping):
        return {name: map_tree(function, part, lists=lists) for name, part in tree.items()}
    if lists and isinstance(tree, list):
        return [map_tree(function, part, lists=lists) for part in tree]
    return function(tree)


def joined(functions: Any) -> Callable[[Any], Any]:
    """Turns a pytree of functions of one argument into one function that returns a pytree of results."""
    if isinstance(functions, tuple):
        parts = [joined(part) for part in functions]
        return lambda value: same_kind(functions, [part(value) for part in parts])
    if isinstance(functions, Mapping):
        named = {name: joined(part) for name, part in functions.items()}
        return lambda value: {name: part(value) for name, part in named.items()}
    function: Callable[[Any], Any] = functions
    return function


def leaves(tree: Any, name: str, *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested tuples and dicts with its path, such as `inputs['image']`.

    Args:
        tree: The pytree.
        name: Name of the tree, the start of each path.
        lists: Whether lists are nodes too, as for `map_tree`.
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


def map_parts(function: Callable[[Any], Any], parts: tuple[Any, Any]) -> tuple[Any, Any]:
    """Applies a function to every leaf of (inputs, targets); targets that are None stay so."""
    inputs, targets = parts
    return map_tree(function, inputs), None if targets is None else map_tree(function, targets)


def part_leaves(parts: tuple[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Every leaf of (inputs, targets) with its path; none of targets that are None."""
    inputs, targets = parts
    yield from leaves(inputs, "inputs")
    if targets is not None:
        yield from leaves(targets, "targets")


def encode_tree(tree: Any, arrays: list[np.ndarray]) -> Any:
    """Encodes a tree of arrays, of any shapes and dtypes, as JSON; appends its leaves to `arrays`."""
    if isinstance(tree, Weighted):
        return {"weighted": [encode_tree(part, arrays) for part in tree]}
    if isinstance(tree, tuple):
        return {"tuple": [encode_tree(part, arrays) for part in tree]}
    if isinstance(tree, dict):
        return {"dict": [[name, encode_tree(part, arrays)] for name, part in tree.items()]}
    if tree is None:
        return None
    import numpy as np  # a plan is made without it

    arrays.append(np.asarray(tree))
    return len(arrays) - 1


def decode_tree(plain: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Inverse of `encode_tree`; the arrays keep shape and dtype."""
    if plain is None:
        return None
    if isinstance(plain, int):
        return arrays[plain]
    if "weighted" in plain:
        return Weighted(*(decode_tree(part, arrays) for part in plain["weighted"]))
    if "tuple" in plain:
        return tuple(decode_tree(part, arrays) for part in plain["tuple"])
    return {name: decode_tree(part, arrays) for name, part in plain["dict"]}
