"""Packed sequences against a loop with torch's ignore_index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check, load

import isotrain

EXAMPLE = "sequence_packing"


def plain(start: Plain) -> None:
    """torch's SGD on the mean over real tokens."""
    import torch

    weights = [variable.value for variable in start.model.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    for inputs, targets in start.batches:
        optimizer.zero_grad()
        outputs = start.model(inputs, training=True)
        logits, tokens = outputs.flatten(0, 1), targets.flatten().long()
        torch.nn.functional.cross_entropy(logits, tokens, ignore_index=-1).backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path, tolerance=1e-9)  # attention: float32 scale


SEQUENCES = [np.arange(length) % 20 for length in (7, 5, 4, 6)]


def together_and_alone(session: isotrain.Session) -> list[np.ndarray]:
    """Predictions for all sequences in two rows, and for each of them in a row of its own."""
    packed = load(EXAMPLE).packed
    return [session.call(packed(part)[0]) for part in (SEQUENCES, *([each] for each in SEQUENCES))]


@pytest.mark.examples
def test_packed_sequences_do_not_see_each_other(tmp_path: Path) -> None:
    together, *alone = isotrain.launch(
        together_and_alone,
        load(EXAMPLE).spec,
        backend="torch-ddp",
        output=tmp_path / "run",
        on_event=lambda event: None,
    )[0]
    assert len(together) == 2, "7, 5 and 4 tokens in a row, and 6"
    for sequence, predictions in zip(SEQUENCES, alone, strict=True):
        length = len(sequence)
        starts = [(row, start) for row in range(2) for start in range(17 - length)]
        expected = predictions[0, :length]
        differences = [
            np.abs(together[row, start : start + length] - expected).max() for row, start in starts
        ]
        assert min(differences) < 1e-5, length
