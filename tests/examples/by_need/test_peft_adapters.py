"""Adapters of peft against a loop over the model's own loss, and their export."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check, load

import isotrain
from isotrain.core.checkpoints.safetensors_file import SafetensorsFile

EXAMPLE = "peft_adapters"


def plain(start: Plain) -> None:
    """torch's SGD on the loss that the model returns."""
    import torch

    trained = [each for each in start.model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.125)
    for inputs, labels in start.batches:
        optimizer.zero_grad()
        start.model(**inputs, labels=labels).loss.backward()
        optimizer.step()


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)


@pytest.mark.examples
def test_exports_adapters_and_head(tmp_path: Path) -> None:
    example = load(EXAMPLE)
    result = isotrain.run(
        example.spec.replace(threads=1),
        backend="torch-ddp",
        replicas=2,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    path = example.export_adapters(result, tmp_path / "adapters.safetensors")
    names = list(SafetensorsFile(path).read_all())
    assert len(names) == 2 * 2 * 2 + 2  # query and value of two layers, A and B; the head
    assert len(names) < len(result.weights)
