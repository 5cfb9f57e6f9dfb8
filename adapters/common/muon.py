"""Orthogonalized updates of Muon, on the tensors of any framework; imports no framework.

Muon: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon. The scale of its updates: J. Liu et al., "Muon is scalable for LLM
training", arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_EPSILON = 1e-7
_ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates, which those of Muon get, so that rates and decay can be the same."""


def orthogonalized(matrix: Any, transpose: Callable[[Any], Any], norm: Callable[[Any], Any]) -> Any:
    """Update for a matrix: about U V^T of its singular value decomposition, by Newton-Schulz iterations.

    Args:
        matrix: Momentum, shape `[rows, columns]`.
        transpose: Function that transposes a matrix.
        norm: Function that returns the Frobenius norm of a matrix, a scalar.

    Returns:
        Direction to subtract, times the rate, in the shape of the matrix.
    """
    rows, columns = matrix.shape
    x = transpose(matrix) if rows > columns else matrix
    x = x / (norm(x) + _EPSILON)
    first, third, fifth = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ transpose(x)
        x = first * x + (third * gram + fifth * (gram @ gram)) @ x
    x = transpose(x) if rows > columns else x
    return x * (_ADAMW_RMS * math.sqrt(max(rows, columns)))
