"""A native model goes on in another framework, by the person's map of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.errors import RunFailedError
from isotrain.core.running.translation import Translation
from isotrain.core.spec.training_spec import TrainingSpec

pytestmark = pytest.mark.slow

START = np.random.default_rng(4).standard_normal((3, 2))
NAMES = {"tensorflow": {"kernel": {"name": "weight", "axes": "IO->OI"}}}


WRONG = (
    (None, r"it lacks .*checkpoint\.map"),
    (
        {"tensorflow": {"kernel": "bias"}},
        r"step-000000005, by `checkpoint\.map`: 'kernel' has shape",
    ),
)


def of_torch() -> Any:
    import torch

    layer = torch.nn.Linear(3, 2, bias=True, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(START.T))
        layer.bias.zero_()
    return layer


def of_tensorflow() -> Any:
    import tensorflow as tf

    class Linear(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = tf.Variable(np.zeros((3, 2)), name="kernel")
            self.bias = tf.Variable(np.zeros(2), name="bias")

        def __call__(self, inputs: Any) -> Any:
            return inputs @ self.kernel + self.bias

    return Linear()


def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(2).standard_normal((22, 3))
    return inputs, np.sin(inputs[:, :2])


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"torch": of_torch, "tensorflow": of_tensorflow},
        "data": data,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.125},
        "precision": "float64",
        "global_batch": 7,
        "steps": 9,
        "checkpoint": {"every_steps": 5, "map": NAMES},
        **changes,
    }


def run(folder: Path, backend: str, **options: Any) -> isotrain.RunResult:
    given = spec(**options.pop("changes", {}))
    return isotrain.run(
        given, backend=backend, run_directory=folder, on_event=lambda event: None, **options
    )


def test_a_portable_model_is_not_translated() -> None:
    before = {"framework": "torch", "backend": "torch-ddp"}
    plan = isotrain.plan(spec(), backend="tf-mirrored")

    def between(model: Any) -> Translation | None:
        return Translation.between(before, plan, TrainingSpec.model_validate(spec(model=model)))

    assert between(of_tensorflow) is None  # one function for all frameworks
    assert between({"torch": of_torch, "tensorflow": of_tensorflow}) is not None
    assert between("registered") is not None  # by a plugin, maybe as such a table


def test_a_native_model_goes_on_in_another_framework(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "torch-ddp", replicas=2)
    run(tmp_path / "half", "torch-ddp", replicas=2, changes={"steps": 5})
    half = tmp_path / "half"
    for number, (wrong, told) in enumerate(WRONG):
        changes = {"checkpoint": {"every_steps": 5, "map": wrong}}
        with pytest.raises(RunFailedError, match=told):
            run(tmp_path / str(number), "tf-mirrored", resume=half, changes=changes)
    found = run(tmp_path / "other", "tf-mirrored", replicas=3, resume=half)
    np.testing.assert_allclose(found.weights["kernel"].T, whole.weights["weight"], atol=1e-12)
    np.testing.assert_allclose(found.weights["bias"], whole.weights["bias"], atol=1e-12)
    events = (tmp_path / "other" / "events.jsonl").read_text(encoding="utf-8")
    assert "each framework has its own" in events
