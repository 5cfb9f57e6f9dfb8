"""The match of the tensors of one program with those of another: by name, or by layer, shape and order."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.tensor_sketch import Fingerprint
from isotrain.analysis.program_trace.reading import TENSORS, GlobalStep, ProgramTrace, Step, Tensors

Shapes = Mapping[str, Sequence[int]]
"""Shapes of tensors, with the axes in torch's order, by name."""
_SAME = 1e-4
"""Relative difference below which initial weights are the same."""
_SAME_NORM = 1e-6
"""The same for norms, which are closer: those of two large random tensors may be 1e-4 apart."""


@dataclass(frozen=True)
class Match:
    """Counterparts of a program's tensors among those of the reference.

    Attributes:
        names: Name of the reference by the name of the program's tensor.
        notes: How tensors of other names were matched, a sentence for each way.
        ambiguous: Tensors that were not matched, because that would be a guess, a sentence for each shape.
    """

    names: Mapping[str, str]
    notes: Sequence[str]
    ambiguous: Sequence[str]


def counterparts(
    names: Shapes,
    reference: Shapes,
    start: Tensors | None = None,
    of_reference: Tensors | None = None,
) -> Match:
    """Matches tensors of one kind, such as all trainable weights.

    Tensors have counterparts of equal names; if none has, of names that are equal without the prefix that all
    names of a program share. What is left has counterparts in the layer of that name, if one tensor there has
    the shape; else of equal shape and initial values; else of equal shape, in order, where both have as many.

    Args:
        names: Shapes of the program's tensors.
        reference: Shapes of the reference's tensors.
        start: Initial values of the program's tensors; without them, these are not looked at.
        of_reference: Initial values of the reference's tensors.
    """
    shorten = _unchanged if names.keys() & reference.keys() else _without_prefix
    short, of_short = shorten(names), shorten(reference)
    matching = _Matching(names, reference)
    matching.pair("by name, without prefixes", short, of_short)
    matching.pair("by layer and shape", _by_layer(names, short), _by_layer(reference, of_short))
    if start and of_reference:
        matching.pair_equal_values(start, of_reference)
    ambiguous = matching.pair_in_order()
    notes = [f"matched {how}: {', '.join(pairs)}" for how, pairs in matching.told.items()]
    return Match(
        {name: matching.pairs[name] for name in names if name in matching.pairs}, notes, ambiguous
    )


class _Matching:
    """A match in progress: pairs tensors that have no counterpart yet."""

    def __init__(self, names: Shapes, reference: Shapes) -> None:
        self._left, self._of_reference = dict(names), dict(reference)
        self.pairs: dict[str, str] = {}
        self.told: dict[str, list[str]] = {}

    def pair(self, how: str, keys: Mapping[str, Hashable], others: Mapping[str, Hashable]) -> None:
        """Pairs tensors whose key one tensor of each program has."""
        by_key, by_other = _grouped(keys, self._left), _grouped(others, self._of_reference)
        for key, names in by_key.items():
            if len(names) == len(by_other.get(key, ())) == 1:
                self._add(names[0], by_other[key][0], how)

    def pair_equal_values(self, start: Tensors, of_reference: Tensors) -> None:
        """Pairs tensors of equal shape whose initial values no other tensor has; zeros are many tensors'."""
        for names, others in self._of_each_shape():
            if len(names) == len(others) == 1:
                continue
            equal = [
                (name, other)
                for name in names
                for other in others
                if name in start
                and other in of_reference
                and start[name].norm
                and tensor_sketch.difference(start[name], of_reference[other]) < _SAME
            ]
            of_name, of_other = Counter(name for name, _ in equal), Counter(o for _, o in equal)
            for name, other in equal:
                if of_name[name] == of_other[other] == 1:
                    self._add(name, other, "by shape and initial values")

    def pair_in_order(self) -> list[str]:
        """Pairs tensors of equal shape in order, where there are as many; returns what says where not."""
        ambiguous = []
        for names, others in self._of_each_shape():
            if len(names) == len(others):
                for name, other in zip(names, others, strict=True):
                    self._add(name, other, "by shape and order")
            else:
                ambiguous.append(
                    "not matched, because it would be a guess: of shape"
                    f" {list(self._left[names[0]])} there are {', '.join(names)}; and in the other program"
                    f" {', '.join(others)}"
                )
        return ambiguous

    def _of_each_shape(self) -> list[tuple[list[str], list[str]]]:
        """Tensors without a counterpart, and those of the reference, of each shape that both have."""
        by_shape, of_reference = (
            _grouped({name: tuple(shape) for name, shape in shapes.items()}, shapes)
            for shapes in (self._left, self._of_reference)
        )
        return [
            (names, of_reference[shape])
            for shape, names in by_shape.items()
            if shape in of_reference
        ]

    def _add(self, name: str, other: str, how: str) -> None:
        del self._left[name], self._of_reference[other]
        self.pairs[name] = other
        if name != other:
            self.told.setdefault(how, []).append(f"{name} is {other}")


def _grouped(keys: Mapping[str, Hashable], names: Iterable[str]) -> dict[Hashable, list[str]]:
    """Names by their key; those without one are left out."""
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for name in names:
        if name in keys:
            groups[keys[name]].append(name)
    return groups


def _unchanged(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def _without_prefix(names: Iterable[str]) -> dict[str, str]:
    """Names without the leading modules or layers that all of them share, by name."""
    words = {name: name.replace(".", "/").split("/") for name in names}
    shared = 0
    while (
        words
        and all(len(each) > shared + 1 for each in words.values())
        and len({each[shared] for each in words.values()}) == 1
    ):
        shared += 1
    return {name: "/".join(each[shared:]) for name, each in words.items()}


def _by_layer(shapes: Shapes, short: Mapping[str, str]) -> dict[str, Hashable]:
    """The layer and the shape of each tensor whose name has a layer: all but the last word."""
    owners = {name: short[name].replace(".", "/").rpartition("/")[0] for name in shapes}
    return {name: (owners[name], tuple(shape)) for name, shape in shapes.items() if owners[name]}


def aligned(reference: ProgramTrace, run: ProgramTrace) -> ProgramTrace:
    """The run with the reference's names of its tensors, and with notes on names that are not equal.

    A tensor whose initial values are those of its counterpart in another order, as after a flattening of
    another layout, keeps its name and so is not compared.
    """
    one, other = _initial(reference), _initial(run)
    names: dict[str, str] = {}
    notes = list(run.notes)
    for of_run, of_reference in zip(_shapes(run), _shapes(reference), strict=True):
        match = counterparts(of_run, of_reference, other, one)
        names |= {name: twin for name, twin in match.names.items() if name != twin}
        notes += [*match.notes, *match.ambiguous]
    arranged = {
        name
        for name, twin in names.items()
        if name in other and twin in one and _is_rearranged(one[twin], other[name])
    }
    names = {name: twin for name, twin in names.items() if name not in arranged}
    if arranged:
        notes.append(f"not compared, as their elements are in another order: {', '.join(arranged)}")
    steps = [
        GlobalStep(step.optimizer, step.index, [_renamed(rank, names) for rank in step.ranks])
        for step in run.steps
    ]
    return dataclasses.replace(run, steps=steps, notes=notes)


def _shapes(trace: ProgramTrace) -> tuple[dict[str, Sequence[int]], dict[str, Sequence[int]]]:
    """Shapes of the weights that optimizers train, and of all other state."""
    shapes = {name: shape for step in trace.steps for name, shape in step.first.shapes.items()}
    trained = {name for step in trace.steps for name in step.first.weight}
    weights = {name: shape for name, shape in shapes.items() if name in trained}
    return weights, {name: shape for name, shape in shapes.items() if name not in trained}


def _initial(trace: ProgramTrace) -> dict[str, Fingerprint]:
    return {name: tensor for step in trace.steps for name, tensor in step.first.initial.items()}


def _is_rearranged(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether norms are equal, and yet not the elements in the same order."""
    are_alike = abs(one.norm - other.norm) <= _SAME_NORM * one.norm
    return are_alike and tensor_sketch.difference(one, other) > _SAME


def _renamed(step: Step, names: Mapping[str, str]) -> Step:
    def rename(name: str) -> str:
        owner, _, slot = name.rpartition("/")
        return names.get(name) or (f"{names[owner]}/{slot}" if owner in names else name)

    def renamed(tensors: Mapping[str, Fingerprint]) -> dict[str, Fingerprint]:
        return {rename(name): tensor for name, tensor in tensors.items()}

    tensors: dict[str, Any] = {kind: renamed(getattr(step, kind)) for kind in TENSORS}
    return dataclasses.replace(
        step,
        groups=[{**group, "names": list(map(rename, group["names"]))} for group in step.groups],
        untrained=list(map(rename, step.untrained)),
        shapes={rename(name): shape for name, shape in step.shapes.items()},
        **tensors,
    )
