"""Dropout by sample against one process that computes the masks with NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "same_dropout"
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def threefry(key: list[Any], counter: list[Any]) -> list[Any]:
    """Threefry-2x32-20 of Salmon et al. (2011) on uint64 arrays that hold 32-bit words."""
    word = np.uint64(0xFFFFFFFF)
    keys = [*key, key[0] ^ key[1] ^ np.uint64(0x1BD11BDA)]
    x, y = (counter[0] + keys[0]) & word, (counter[1] + keys[1]) & word
    for turn in range(20):
        bits = np.uint64(ROTATIONS[turn % 8])
        x = (x + y) & word
        y = (((y << bits) | (y >> (np.uint64(32) - bits))) & word) ^ x
        if turn % 4 == 3:
            number = turn // 4 + 1
            x = (x + keys[number % 3]) & word
            y = (y + keys[(number + 1) % 3] + np.uint64(number)) & word
    return [x, y]


def keeps(step: int, samples: int, width: int) -> np.ndarray:
    """Which units the first dropout of a step keeps, shape [samples, width]."""
    zero, seed = np.zeros(1, np.uint64), np.full(1, 5, np.uint64)
    key = threefry([seed, zero], [zero, zero])
    key[1] = (key[1] + np.uint64(step)) & np.uint64(0xFFFFFFFF)
    rows, blocks = np.indices((samples, width // 2)).astype(np.uint64)
    words = np.stack(threefry(key, [rows, blocks]), -1).reshape(samples, width)
    return (words >> np.uint64(9)) < 0.75 * 2**23


def plain(start: Plain) -> None:
    """torch's SGD on whole batches, with the masks of each step."""
    import torch

    first, _, second = start.model.layers
    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, 0.125)
    for step, (inputs, targets) in enumerate(start.batches):
        mask = torch.from_numpy(keeps(step, len(inputs), 16)) / 0.75
        optimizer.zero_grad()
        logits = second(first(inputs) * mask)
        torch.nn.functional.cross_entropy(logits, targets).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
