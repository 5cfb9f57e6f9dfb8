"""A run that is resumed elsewhere against one that is never stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from examples.by_need.harness import load

import isotrain

EXAMPLE = "resume_elsewhere"


@pytest.mark.examples
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("torch-ddp", 2), ("tf-multiworker", 2)),
        (("tf-mirrored", 1), ("horovod-torch", 2)),
        (("horovod-tf", 2), ("torch-ddp", 1)),
    ],
)
def test_equals_an_uninterrupted_run(
    first: tuple[str, int], second: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load(EXAMPLE)
    monkeypatch.setattr(example, "spec", example.spec.replace(precision="float64", threads=1))
    whole = isotrain.run(example.spec, backend="torch-ddp", replicas=1, output=tmp_path / "whole")
    example.first_half(tmp_path / "run", *first)
    resumed = example.second_half(tmp_path / "run", *second)
    for name, weight in whole.weights.items():
        np.testing.assert_allclose(resumed.weights[name], weight, rtol=0, atol=1e-12, err_msg=name)
