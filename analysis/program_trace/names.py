"""The match of the tensors of one program with those of another: by name, or by shape and order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.tensor_sketch import Fingerprint
from isotrain.analysis.program_trace.reading import TENSORS, GlobalStep, ProgramTrace, Step

Shapes = Mapping[str, Sequence[int]]
"""Shapes of tensors, with the axes in torch's order, by name."""
_SAME = 1e-4
"""Relative difference below which initial weights are the same."""


def counterparts(names: Shapes, reference: Shapes) -> tuple[dict[str, str], str]:
    """Names of the reference by the name of another program's tensor, and how they were found.

    Tensors have counterparts of equal names; if none has, of names that are equal without the prefix that all
    names of a program share; else of equal shapes, in order, where both have as many of a shape.
    """
    for shortened, how in ((_unchanged, ""), (_without_prefix, "by name, without prefixes")):
        by_short = dict(zip(shortened(reference), reference, strict=True))
        pairs = dict(zip(names, shortened(names), strict=True))
        if common := {name: by_short[s] for name, s in pairs.items() if s in by_short}:
            return common, how
    by_shape, of_reference = _by_shape(names), _by_shape(reference)
    found = {
        name: other
        for shape, each in by_shape.items()
        if len(each) == len(of_reference.get(shape, ()))
        for name, other in zip(each, of_reference[shape], strict=True)
    }
    return {name: found[name] for name in names if name in found}, "by shape and order"


def _unchanged(names: Iterable[str]) -> list[str]:
    return list(names)


def _without_prefix(names: Iterable[str]) -> list[str]:
    """Names without the leading modules or layers that all of them share."""
    words = [name.replace(".", "/").split("/") for name in names]
    shared = 0
    while all(len(each) > shared + 1 for each in words) and len({w[shared] for w in words}) == 1:
        shared += 1
    return ["/".join(each[shared:]) for each in words]


def _by_shape(shapes: Shapes) -> dict[tuple[int, ...], list[str]]:
    names: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        names.setdefault(tuple(shape), []).append(name)
    return names


def aligned(reference: ProgramTrace, run: ProgramTrace) -> ProgramTrace:
    """The run with the reference's names of its tensors, and with notes on names that are not equal.

    A tensor whose initial values are those of its counterpart in another order, as after a flattening of
    another layout, keeps its name and so is not compared.
    """
    names, how = counterparts(_shapes(run), _shapes(reference))
    if not how or not names:
        return run
    one, other = _initial(reference), _initial(run)
    arranged = {
        name
        for name, twin in names.items()
        if name in other and twin in one and _is_rearranged(one[twin], other[name])
    }
    names = {name: twin for name, twin in names.items() if name not in arranged}
    notes = [note_of(names, how)] if names else []
    if arranged:
        notes.append(f"not compared, as their elements are in another order: {', '.join(arranged)}")
    steps = [
        GlobalStep(step.optimizer, step.index, [_renamed(rank, names) for rank in step.ranks])
        for step in run.steps
    ]
    return dataclasses.replace(run, steps=steps, notes=notes)


def note_of(names: Mapping[str, str], how: str) -> str:
    """A note on how tensors were matched."""
    return f"matched {how}: {', '.join(f'{name} is {twin}' for name, twin in names.items())}"


def _shapes(trace: ProgramTrace) -> dict[str, Sequence[int]]:
    return {name: shape for step in trace.steps for name, shape in step.first.shapes.items()}


def _initial(trace: ProgramTrace) -> dict[str, Fingerprint]:
    return {name: tensor for step in trace.steps for name, tensor in step.first.initial.items()}


def _is_rearranged(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether norms and largest absolute values are equal, and yet not the elements in the same order."""
    apart = max(abs(one.norm - other.norm), abs(one.max_abs - other.max_abs))
    return apart <= _SAME * one.norm and tensor_sketch.difference(one, other) > _SAME


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
