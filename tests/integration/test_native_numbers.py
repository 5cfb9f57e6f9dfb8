"""Named losses and metrics of native torch models are torch's, and equal to Keras' in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.plugin import TensorFunctions

pytestmark = pytest.mark.slow

NUMBERS = Path(__file__).with_name("native_numbers.py")


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore:You are passing weight as", str(NUMBERS)],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_every_name_is_tried(numbers: dict[str, Any], kind: str) -> None:
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


def test_metrics_and_their_names(numbers: dict[str, Any]) -> None:
    for label, ours, theirs in numbers["metrics"]:
        assert list(ours) == list(theirs), label
        np.testing.assert_allclose(
            list(ours.values()), list(theirs.values()), rtol=1e-12, atol=1e-12, err_msg=label
        )
        assert any(ours.values()), label
    assert len(numbers["native metrics"]) > 60
    assert "KerasMetric" not in numbers["native metrics"]
