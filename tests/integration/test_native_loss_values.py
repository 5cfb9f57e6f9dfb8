"""Named losses and metrics of native torch models are torch's, and equal to Keras' in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated

import isotrain
from isotrain.plugin import TensorFunctions

pytestmark = pytest.mark.features

SPEC: dict[str, Any] = {
    "data": (np.ones((1, 2)), np.ones((1, 1))),
    "loss": "mse",
    "optimizer": {"name": "sgd", "lr": 0.5},
    "precision": "float64",
    "global_batch_size": 1,
    "steps": 1,
}


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def computed(session: isotrain.Session) -> dict[str, Any]:
    """Both, in a process of a portable model on torch."""
    from integration import native_loss_values

    session.close()
    return native_loss_values.numbers()


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("numbers") / "run"
    found: dict[str, Any] = run_isolated(computed, {**SPEC, "model": model}, "torch-ddp", folder)
    return found


@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_every_loss_and_metric_name_has_a_case(numbers: dict[str, Any], kind: str) -> None:
    tried = {"loss": "losses", "metric": "metrics"}[kind]
    assert numbers[f"{tried} tried"] == numbers[f"{kind} names"]


def test_functions_of_strategies_are_those_of_keras(numbers: dict[str, Any]) -> None:
    names = {name for name in vars(TensorFunctions) if not name.startswith("_")}
    assert numbers["functions"] == dict.fromkeys(names, True)


def test_losses_and_gradients(numbers: dict[str, Any]) -> None:
    assert sum(label.endswith("weighted") for label, *_ in numbers["losses"]) > 45
    for label, ours, theirs in numbers["losses"]:
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-12, atol=1e-12, err_msg=label)
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-12, atol=1e-12, err_msg=label)
        assert np.any(ours[1]), label


def test_none_raises_for_numbers_that_are_not_finite_or_no_probabilities(
    numbers: dict[str, Any],
) -> None:
    """A run ends by a loss that is NaN, and names its cause: that needs a loss."""
    assert numbers["refusals"] == []


def test_metrics_and_their_names(numbers: dict[str, Any]) -> None:
    for label, ours, theirs in numbers["metrics"]:
        assert list(ours) == list(theirs), label
        np.testing.assert_allclose(
            list(ours.values()), list(theirs.values()), rtol=1e-12, atol=1e-12, err_msg=label
        )
        assert any(ours.values()), label
    assert len(numbers["native metrics"]) > 60
    assert "KerasMetric" not in numbers["native metrics"]
