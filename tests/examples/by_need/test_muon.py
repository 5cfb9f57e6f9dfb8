"""Muon and AdamW by name against two optimizers in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "muon"


def plain(start: Plain) -> None:
    """Two optimizers: Muon as its author has it, with the scale of Moonlight; and torch's AdamW."""
    import torch

    parameters = [variable.value for variable in start.model.trainable_variables]
    matrices = [each for each in parameters[:-2] if each.dim() == 2]
    others = [each for each in parameters if not any(each is matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(
        others, 0.0625 / 8, (0.875, 0.9375), float(np.float32(1e-7)), weight_decay=0
    )
    buffers = [torch.zeros_like(each) for each in matrices]
    for inputs, targets in start.batches:
        logits = start.model(inputs, training=True)
        loss = torch.nn.functional.cross_entropy(logits, targets.long())
        for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            each.grad = gradient
        adamw.step()
        with torch.no_grad():
            for matrix, buffer in zip(matrices, buffers, strict=True):
                buffer.lerp_(matrix.grad, 1 - 0.9375)
                update = zeropower(matrix.grad.lerp(buffer, 0.9375))
                matrix.sub_(update * 0.2 * max(matrix.shape) ** 0.5, alpha=0.0625)


def zeropower(matrix: Any) -> Any:
    """Newton-Schulz iterations, https://kellerjordan.github.io/posts/muon."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    x = matrix / (matrix.norm() + 1e-7)
    if matrix.size(0) > matrix.size(1):
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
