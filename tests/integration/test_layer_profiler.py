"""Profiles of a pipeline's layers, by a clock that only planted seconds move."""

from __future__ import annotations

from typing import Any

import pytest
from integration import planted_seconds as planted

from isotrain.testing.launching import try_run

PARTS: dict[str, dict[str, Any]] = {
    "torch-ddp": {
        "model": {"torch": planted.torch_model},
        "loss": planted.torch_loss,
        "metrics": [planted.torch_metric],
    },
    "tf-multiworker": {
        "model": {"tensorflow": planted.tensorflow_model},
        "loss": planted.tensorflow_loss,
        "metrics": [planted.tensorflow_metric],
    },
}


@pytest.mark.parametrize("backend", PARTS)
def test_a_profile_has_what_a_step_computes(backend: str) -> None:
    """Each layer, without the gradient of the model's inputs; the loss, the metric and the updates."""
    options = {"stages": 2, "cut": ["second"]}
    spec = {
        **PARTS[backend],
        "data": planted.data,
        "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.5},
        "global_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "epochs": 1,
        "clip": {"global_norm": 0.25},
        "strategy": {"name": "pipeline", "options": options},
    }
    run = try_run(planted.profiled, spec, backend, 1)
    assert run.failure is None, run.failure
    for place in run.returned:
        first, second, third = place["layers"]
        found = [(each["forward"], each["backward"]) for each in (first, second, third)]
        assert found == [(1, 2), (4, 8 + planted.OF_INPUT), (16, 32 + planted.OF_INPUT)]
        assert place["loss_seconds"] == sum(planted.LOSS) + planted.METRIC
        updates = [each["update"] for each in (first, second, third)]
        assert updates == [96.0, 64.0, 32.0], "72 and 36 weights share an update"
        assert not place["changed"]
        assert not any(place["metrics"].values())
