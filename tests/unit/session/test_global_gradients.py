"""Functions of the mean gradients, and steps of one's own, on the reference backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.resume_runs import data, plain

import isotrain
from isotrain.core.errors import RunFailedError, UnsupportedError

pytestmark = pytest.mark.usefixtures("reference")


def spec(**changes: Any) -> isotrain.TrainingSpec:
    fields = {
        "model": {"numpy": plain},
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.125},
        "precision": "float64",
        "global_batch_size": 7,
        "steps": 3,
    }
    return isotrain.TrainingSpec(**fields | changes)


def halved(names: list[str], gradients: list[Any]) -> list[Any]:
    return [gradient * 0.5 for gradient in gradients]


def minus_weights(names: list[str], gradients: list[Any], weights: list[Any]) -> list[Any]:
    """Cancels the step and a decay that moves every weight to 0 at once."""
    return [weight * 8.0 for weight in weights]


def too_few(names: list[str], gradients: list[Any]) -> list[Any]:
    return gradients[1:]


def other_shape(names: list[str], gradients: list[Any]) -> list[Any]:
    return [gradient[..., :1] for gradient in gradients]


def trained(folder: Path, replicas: int = 2, **changes: Any) -> isotrain.RunResult:
    return isotrain.run(spec(**changes), backend="reference", replicas=replicas, output=folder)


def test_half_gradients_are_half_the_rate(tmp_path: Path) -> None:
    result = trained(tmp_path / "halved", gradients=halved)
    expected = trained(tmp_path / "rate", 1, optimizer={"name": "sgd", "lr": 0.0625})
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(result.weights[name], weight, rtol=0, atol=1e-12)


def test_a_function_of_three_parameters_gets_the_weights(tmp_path: Path) -> None:
    result = trained(tmp_path / "run", gradients=minus_weights, steps=1)
    assert all(not np.any(weight) for weight in result.weights.values())


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (too_few, "expected a list of 4 gradients"),
        (other_shape, r"returned shape \(.*, 1\) for .*; expected"),
    ],
)
def test_wrong_results_are_refused(function: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=text):
        trained(tmp_path / "run", 1, gradients=function)


@pytest.mark.parametrize("strategy", ["local-sgd", "sharded", "parameter-server", "hierarchical"])
def test_strategies_with_steps_of_their_own_refuse_it(strategy: str) -> None:
    with pytest.raises(UnsupportedError, match=r"gradients: .* Use strategy data-parallel"):
        isotrain.plan(spec(gradients=halved, strategy=strategy), backend="reference", replicas=2)


def own_steps(session: isotrain.Session) -> tuple[list[float], dict[str, np.ndarray]]:
    losses = []
    for batch in session.batches():
        gradients, loss = session.gradients(batch)
        session.apply_gradients(batch, gradients, loss)
        losses.append(float(session.last_loss))
    return losses, session.read_state(["trainable"])


def steps(session: isotrain.Session) -> tuple[list[float], dict[str, np.ndarray]]:
    losses = [float(session.step(batch)) for batch in session.batches()]
    return losses, session.read_state(["trainable"])


def test_gradients_and_their_application_are_a_step(tmp_path: Path) -> None:
    runs = [
        isotrain.launch(
            loop, spec(), backend="reference", replicas=2, output=tmp_path / loop.__name__
        )[0]
        for loop in (own_steps, steps)
    ]
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-12)
    for name, weight in runs[1][1].items():
        np.testing.assert_allclose(runs[0][1][name], weight, rtol=0, atol=1e-12)


def test_a_loop_that_reads_gradients_needs_the_backends_own_step(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"session\.gradients: .* 'local-sgd'"):
        isotrain.launch(
            own_steps,
            spec(strategy="local-sgd"),
            backend="reference",
            replicas=2,
            output=tmp_path / "run",
        )
