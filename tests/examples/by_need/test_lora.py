"""LoRA against a loop that trains the adapters, and the export of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check, load

import isotrain
from isotrain.core.checkpoints.safetensors_file import SafetensorsFile

EXAMPLE = "lora"
TOLERANCE = 2e-6
"""Keras keeps adapters in float32, whatever the precision of the layer."""


def plain(start: Plain) -> None:
    """Keras' Adam on the adapters and the head's kernel."""
    import keras
    import torch

    weights = [v for v in start.model.trainable_variables if not v.path.endswith("bias")]
    optimizer = keras.optimizers.Adam(0.0078125)
    for inputs, targets in start.batches:
        logits = start.model(inputs, training=True)
        loss = torch.nn.functional.cross_entropy(logits, targets.long())
        gradients = torch.autograd.grad(loss, [each.value for each in weights])
        with torch.no_grad():
            optimizer.apply(gradients, weights)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path, tolerance=TOLERANCE)


@pytest.mark.examples
def test_exports_what_was_trained(tmp_path: Path) -> None:
    example = load(EXAMPLE)
    result = isotrain.run(
        example.spec.replace(threads=1),
        backend="torch-ddp",
        replicas=2,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    path = example.export_adapters(result, tmp_path / "adapters.safetensors")
    names = sorted(SafetensorsFile(path).read_all())
    kernels = [f"hidden_{layer}/lora_kernel_{part}" for layer in (1, 2) for part in "ab"]
    assert [name.partition("/")[2] for name in names] == ["head/kernel", *kernels]
