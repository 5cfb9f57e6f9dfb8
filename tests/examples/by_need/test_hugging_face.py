"""A model of Hugging Face against a loop over its own loss, and what `from_pretrained` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check, load

import isotrain

EXAMPLE = "hugging_face"
TOLERANCE = 1e-6
"""The model computes its loss in float32."""


def plain(start: Plain) -> None:
    """torch's AdamW on the loss that the model returns."""
    import torch

    optimizer = torch.optim.AdamW(start.model.parameters(), lr=0.001, weight_decay=0.01, eps=1e-7)
    for inputs, labels in start.batches:
        optimizer.zero_grad()
        start.model(**inputs, labels=labels).loss.backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path, tolerance=TOLERANCE)


@pytest.mark.examples
def test_from_pretrained_reads_what_was_trained(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    example = load(EXAMPLE)
    spec = example.spec.replace(threads=1)
    result = isotrain.run(
        spec,
        backend="torch-ddp",
        replicas=2,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    example.save(result, tmp_path / "trained")
    network = GPT2LMHeadModel.from_pretrained(tmp_path / "trained")
    samples = np.arange(24).reshape(2, 12)
    inputs = {"input_ids": samples, "attention_mask": np.ones_like(samples)}
    predictions = isotrain.predict(result, inputs, spec=spec)
    import torch

    logits = network(**{name: torch.from_numpy(array) for name, array in inputs.items()}).logits
    np.testing.assert_allclose(predictions, logits.detach().numpy(), atol=1e-5)
