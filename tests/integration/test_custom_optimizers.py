"""Optimizers of one's own, one for each of their options, against the plain program that has the same one."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated
from integration import custom_optimizers as own

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

IN_GRAPHS = (
    "clipnorm",
    "global_clipnorm",
    "weight_decay",
    "excluded from decay",
    "use_ema",
    "loss_scale_factor",
    "Muon",
)
"""On TensorFlow, which traces each of them: what it computes in another place, or before an exchange."""
BY_A_CONDITION = ("ema_overwrite_frequency", "gradient_accumulation_steps")
PORTABLE = [
    *(("torch-ddp", name) for name in own.OPTIONS),
    *(("horovod-tf", name) for name in (*IN_GRAPHS, *BY_A_CONDITION)),
    *(("tf-mirrored", name) for name in IN_GRAPHS),
    *(("tf-multiworker", name) for name in ("clipnorm", "use_ema", "loss_scale_factor")),
]
NATIVE = [(backend, name) for backend in ("torch-ddp", "horovod-torch") for name in own.TORCH]


@pytest.fixture(scope="module")
def beside_runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("optimizers") / "run"
    return run_isolated(own.beside_runs, own.spec("clipnorm"), "torch-ddp", folder)


@functools.cache
def trained(backend: str) -> dict[str, Any]:
    specs = {name: own.spec(name) for under, name in PORTABLE if under == backend}
    return launched_in_turn(specs, own.trained, backend, 2)[1 if backend != "tf-mirrored" else 0]


@pytest.mark.parametrize(("backend", "name"), PORTABLE)
def test_keras_optimizers(beside_runs: Any, backend: str, name: str) -> None:
    """Two replicas end as `fit` on one; `fit` puts averages in place of weights at its end."""
    found, plain = trained(backend)[name], beside_runs[0][name]
    assert any(np.abs(plain[key] - start).max() > 1e-4 for key, start in found["before"].items())
    for key, value in plain.items():
        np.testing.assert_allclose(found["after"][key], value, rtol=0, atol=2e-6, err_msg=key)


@functools.cache
def trained_natively(backend: str) -> dict[str, Any]:
    specs = {name: own.torch_spec(name) for under, name in NATIVE if under == backend}
    return launched_in_turn(specs, own.natively, backend, 2)[1]


@pytest.mark.parametrize(("backend", "name"), NATIVE)
def test_torch_optimizers(backend: str, name: str) -> None:
    """Two replicas end as a plain loop on one, with the rates that it used."""
    found = trained_natively(backend)[name]
    for key, value in found["plain"].items():
        np.testing.assert_allclose(found["after"][key], value, rtol=0, atol=2e-6, err_msg=key)
    assert found["shown"] == pytest.approx(found["plain rates"])


def test_rates_of_a_scheduler_are_recorded(tmp_path: Any) -> None:
    """The history has the rate of each step; the plan says that the rates are not the run's own."""
    result = isotrain.run(
        own.torch_spec("scheduler"), backend="torch-ddp", replicas=1, output=tmp_path / "run"
    )
    assert result.history.learning_rate == pytest.approx([own.LR / (2 + step) for step in range(6)])
    assert any("its own learning-rate scheduler" in text for text in result.plan["notes"])


def test_unsupported_optimizers_are_refused(beside_runs: Any) -> None:
    """The refusal comes before any step, and names the optimizer."""
    _, told = beside_runs
    for name, part in own.REFUSED.items():
        assert part in told[name], (name, told[name])


def test_tensorflow_refuses_conditional_updates() -> None:
    """`MirroredStrategy` fails in the first step; plain Keras does too."""
    for option in BY_A_CONDITION:
        with pytest.raises(isotrain.RunFailedError, match=f"{option}: Keras then updates"):
            isotrain.run(own.spec(option), backend="tf-mirrored", replicas=2)
