"""Whether samples without targets are refused before the first step."""

from __future__ import annotations

import pytest

from isotrain.core.session.training.train_step import needs_targets
from isotrain.core.spec.training_spec import TrainingSpec


def of_outputs(output: object) -> object:
    return output


@pytest.mark.parametrize(("framework", "needed"), [("torch", True), ("tensorflow", False)])
def test_the_loss_of_the_framework_decides(framework: str, needed: bool) -> None:
    spec = TrainingSpec(
        model={"torch": of_outputs, "tensorflow": of_outputs},
        loss={"torch": "mse", "tensorflow": of_outputs},
        data=of_outputs,
        optimizer={"name": "sgd", "lr": 0.1},
        global_batch_size=4,
        epochs=1,
    )
    assert needs_targets(spec, framework) is needed
