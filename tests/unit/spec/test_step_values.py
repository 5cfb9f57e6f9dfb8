"""Values of steps: numbers, linear changes, callables."""

from __future__ import annotations

from typing import Any

import pytest

from isotrain.core.errors import SpecError
from isotrain.core.spec.step_values import LinearValue, values_at
from isotrain.core.spec.training_spec import TrainingSpec


def _objective(model: Any, batch: Any, step: Any) -> Any: ...


def _spec(**fields: Any) -> TrainingSpec:
    defaults: dict[str, Any] = {
        "model": _objective,
        "data": _objective,
        "objective": _objective,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch_size": 8,
        "steps": 2,
    }
    return TrainingSpec(**{**defaults, **fields})


def test_values_of_a_step() -> None:
    linear = {"name": "linear", "start": 0.0, "end": 2.0, "steps": 4}
    spec = _spec(values={"a": 3, "b": linear, "c": lambda step: step**2})
    assert values_at(spec.values, 1) == {"a": 3.0, "b": 0.5, "c": 1.0}
    assert values_at(spec.values, 9) == {"a": 3.0, "b": 2.0, "c": 81.0}
    assert spec.values["b"] == LinearValue(start=0.0, end=2.0, steps=4)
    assert spec.to_dict()["values"]["b"] == {**linear, "steps": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"values": {"a": "beta"}}, "values.a"),
        ({"values": {"a": {"start": 0.0, "end": 1.0}}}, "values.a"),
        ({"values": {"a": True}}, "values.a"),
        (
            {"values": {"a": 1.0}, "loss": "mse", "objective": None},
            "expected an objective with values",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _spec(**fields)
