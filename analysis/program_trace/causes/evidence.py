"""Helpers of causes: names of tensors that part between processes, factors between gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.program_trace.case import Case
from isotrain.analysis.program_trace.reading import GlobalStep, Tensors

FITS = 1e-2
"""A hypothesis explains gradients if what is left is below this fraction of their norm."""


def both(case: Case) -> tuple[GlobalStep, GlobalStep]:
    """The step of the reference, and that of the run."""
    return case.reference_step, case.run_step


def backward_passes(step: GlobalStep) -> int:
    """Number of backward passes of a process."""
    return len(step.first.of_kind("backward"))


def parting_names(one: Tensors, other: Tensors) -> set[str]:
    """Names of tensors that differ between two processes by more than their kernels' rounding."""
    return {
        name
        for name, tensor in one.items()
        if name in other and tensor_sketch.difference(tensor, other[name]) > FITS
    }


def combined(factors: list[float], one: Tensors, other: Tensors) -> Tensors:
    """A sum of the tensors that both have, each side times its factor."""
    return {
        name: tensor_sketch.combination(factors, [tensor, other[name]])
        for name, tensor in one.items()
        if name in other
    }


def ratio_of(reference: Tensors, run: Tensors) -> tuple[float, float]:
    """The factor between tensors, by least squares, and what is left relative to the run's norm."""
    names = [name for name in run if name in reference]
    one = np.concatenate([reference[name].sketch for name in names] or [(0.0,)])
    other = np.concatenate([run[name].sketch for name in names] or [(0.0,)])
    size, whole = float(one @ one), float(np.linalg.norm(other))
    if not size or not whole or not math.isfinite(size + whole):
        return 1.0, math.inf
    ratio = float(one @ other) / size
    return ratio, float(np.linalg.norm(other - ratio * one)) / whole


def listed(names: Sequence[str] | set[str]) -> str:
    """The first names, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if ordered[3:] else "")
