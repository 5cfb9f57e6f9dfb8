"""Gradient clipping applied to fingerprints."""

from __future__ import annotations

from dataclasses import replace

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.run_trace import Tensors
from isotrain.core.spec.sections import Clip


def clipped(gradients: Tensors, clip: Clip) -> Tensors:
    """The fingerprints of one replica's gradients after clipping.

    Clipping by norm multiplies tensors by a factor, which fingerprints follow exactly. Clipping by value
    is exact only for elements that are known: tensors that are kept whole keep their sketch, others only
    their sample.
    """
    if clip.value is not None:
        return {name: _bounded(tensor, clip.value) for name, tensor in gradients.items()}
    total = tensor_sketch.length([tensor.norm for tensor in gradients.values()])
    return {
        name: tensor_sketch.combination(
            [_factor(tensor.norm, clip.norm) if clip.norm else _factor(total, clip.global_norm)],
            [tensor],
        )
        for name, tensor in gradients.items()
    }


def _factor(norm: float, bound: float | None) -> float:
    return 1.0 if bound is None or norm <= bound else bound / norm


def _bounded(tensor: tensor_sketch.Fingerprint, bound: float) -> tensor_sketch.Fingerprint:
    sample = tuple(min(max(value, -bound), bound) for value in tensor.sample)
    whole = tensor.size <= tensor_sketch.WHOLE
    return replace(tensor, sketch=sample if whole else (), sample=sample)
