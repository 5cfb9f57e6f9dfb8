"""Models and objectives that differentiate inside are evaluated and asked for predictions as any other."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration import differentiating_models as own

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

NATIVE = [(backend, name) for backend in ("torch-ddp", "horovod-torch") for name in own.NATIVE]


@functools.cache
def worked(backend: str, replicas: int = 2) -> list[dict[str, Any]]:
    cases = own.NATIVE if backend == "horovod-torch" else own.PORTABLE
    cases = own.NATIVE | own.PORTABLE if backend == "torch-ddp" else cases
    return launched_in_turn(cases, own.worked, backend, replicas)


@pytest.mark.parametrize(("backend", "name"), NATIVE)
def test_native_models(backend: str, name: str) -> None:
    """Two replicas train, evaluate and predict what a plain program does."""
    for found in (each[name] for each in worked(backend)):
        plain = found["plain"]
        for key, value in plain["after"].items():
            np.testing.assert_allclose(found["after"][key], value, atol=1e-6)
        for key, value in found["evaluated"].items():
            assert value == pytest.approx(plain[key], rel=1e-5)
        np.testing.assert_allclose(found["predicted"], plain["predicted"], atol=1e-6)


@pytest.mark.parametrize("name", own.PORTABLE)
def test_portable_models(name: str) -> None:
    """Two replicas on torch, captured or not, and two on TensorFlow give the same."""
    torch, tensorflow = (worked(backend)[0][name] for backend in ("torch-ddp", "tf-mirrored"))
    for key, value in tensorflow["after"].items():
        np.testing.assert_allclose(torch["after"][key], value, atol=1e-6)
    assert torch["evaluated"] == pytest.approx(tensorflow["evaluated"], rel=1e-5)
    np.testing.assert_allclose(torch["predicted"], tensorflow["predicted"], atol=1e-6)


def test_a_run_that_never_evaluates_tries_its_metrics(tmp_path: Path) -> None:
    """It also predicts from its files, and exports its model."""
    spec = {**own.NATIVE["forces"], "evaluation": {"every_epochs": 0}}
    result = isotrain.run(spec, backend="torch-ddp", replicas=1, output=tmp_path / "run")
    predicted = isotrain.predict(result, own.SAMPLES)
    assert predicted.shape == own.SAMPLES.shape
    isotrain.export(result, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > 0
