"""Examples that record, evaluate and call back: equal to plain programs, which compute the same by hand."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.by_need.harness import cells, load

import isotrain
from isotrain.core.results.result import RunResult, read_history


def spec_of(name: str) -> isotrain.TrainingSpec:
    return load(name).spec.replace(precision="float64", threads=1, loggers=[])


@functools.cache
def plain(
    name: str, observe: Callable[..., Any], lr: float | None = None
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Plain torch on the model, data and optimizer of an example: one process, whole batches.

    Returns:
        Final weights by name; and what `observe(loss, model, optimizer)` returned after each step.
    """

    def work(session: isotrain.Session) -> list[Any]:
        import torch

        batches = [each.slices[0][0] for each in session.batches()]
        model, sgd = session.model, session.spec.optimizer
        weights = [variable.value for variable in model.trainable_variables]
        optimizer = torch.optim.SGD(weights, lr=lr or sgd.lr, momentum=sgd.momentum)
        observed = []
        for batch in batches:
            optimizer.zero_grad()
            predicted = model(batch.inputs, training=True)
            if predicted.shape == batch.targets.shape:
                loss = torch.nn.functional.mse_loss(predicted, batch.targets)
            else:
                loss = torch.nn.functional.cross_entropy(predicted, batch.targets.long())
            loss.backward()
            optimizer.step()
            observed.append(observe(float(loss), model, optimizer))
        return [session.read_state(["trainable"]), observed]

    with tempfile.TemporaryDirectory() as folder:
        return launch(work, name, "torch-ddp", 1, Path(folder) / "run")


def launch(work: Any, name: str, backend: str, replicas: int, folder: Path) -> Any:
    return isotrain.launch(
        work,
        spec_of(name),
        backend=backend,
        replicas=replicas,
        output=folder,
        on_event=lambda event: None,
    )[0]


def run(name: str, backend: str, replicas: int, folder: Path) -> RunResult:
    return isotrain.run(
        spec_of(name),
        backend=backend,
        replicas=replicas,
        output=folder / "run",
        on_event=lambda event: None,
    )


def assert_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-12, err_msg=name)


def halve_every_third(loss: float, model: Any, optimizer: Any) -> float:
    """The rate of the step."""
    group = optimizer.param_groups[0]
    group["steps"] = group.get("steps", 0) + 1
    rate: float = group["lr"]
    group["lr"] = rate / 2 if group["steps"] % 3 == 0 else rate
    return rate


@pytest.mark.examples
@cells("callbacks")
def test_callbacks(backend: str, replicas: int, tmp_path: Path) -> None:
    weights, rates = plain("callbacks", halve_every_third)
    result = run("callbacks", backend, replicas, tmp_path)
    assert result.history.scalars["rate_of_step"] == dict(enumerate(rates))
    assert_equal(result.weights, weights)


def own_loss(loss: float, model: Any, optimizer: Any) -> float:
    return loss


@pytest.mark.examples
@cells("own_scalars")
def test_own_scalars(backend: str, replicas: int, tmp_path: Path) -> None:
    weights, losses = plain("own_scalars", own_loss)
    averages = [0.0]
    for loss in losses:
        averages.append(0.75 * averages[-1] + 0.25 * loss)

    def work(session: isotrain.Session) -> dict[str, np.ndarray]:
        load("own_scalars").train(session)
        return session.read_state(["trainable"])

    found = launch(work, "own_scalars", backend, replicas, tmp_path / "run")
    assert_equal(found, weights)
    scalars = read_history(tmp_path / "run").scalars
    np.testing.assert_allclose([*scalars["rmse"].values()], np.sqrt(losses), rtol=1e-12)
    np.testing.assert_allclose([*scalars["average_loss"].values()], averages[1:], rtol=1e-12)


@pytest.mark.examples
@cells("log_media")
def test_log_media(backend: str, replicas: int, tmp_path: Path) -> None:
    weights, _ = plain("log_media", own_loss)

    def work(session: isotrain.Session) -> dict[str, np.ndarray]:
        load("log_media").train(session)
        return session.read_state(["trainable"])

    assert_equal(launch(work, "log_media", backend, replicas, tmp_path / "run"), weights)
    names = {each.parent.name for each in (tmp_path / "run" / "media").rglob("step-00000000[25].*")}
    assert names == {"reconstruction", "kernel", "summary"}


def total_norms(loss: float, model: Any, optimizer: Any) -> list[float]:
    """The norms of the gradients that the step has used: of all, and of each of the two layers."""
    norms = [variable.value.grad.norm() for variable in model.trainable_variables]
    return [float(sum(norm**2 for norm in part) ** 0.5) for part in (norms, norms[:2], norms[2:])]


@pytest.mark.examples
@cells("gradient_norm")
def test_gradient_norm(backend: str, replicas: int, tmp_path: Path) -> None:
    weights, norms = plain("gradient_norm", total_norms)
    result = run("gradient_norm", backend, replicas, tmp_path)
    assert_equal(result.weights, weights)
    names = "gradient_norm", "gradient_norm_hidden", "gradient_norm_output"
    for name, expected in zip(names, zip(*norms, strict=True), strict=True):
        recorded = result.history.scalars[name]
        assert list(recorded) == [*range(len(norms))]
        np.testing.assert_allclose([*recorded.values()], expected, rtol=1e-12)


def norms_of_weights(loss: float, model: Any, optimizer: Any) -> dict[str, float]:
    """The norm of the gradient of each weight that the step has used."""
    return {each.path: float(each.value.grad.norm()) for each in model.trainable_variables}


@pytest.mark.examples
@cells("gradient_norm_by_layer")
def test_gradient_norm_by_layer(backend: str, replicas: int, tmp_path: Path) -> None:
    weights, norms = plain("gradient_norm_by_layer", norms_of_weights)

    def work(session: isotrain.Session) -> dict[str, np.ndarray]:
        load("gradient_norm_by_layer").train(session)
        return session.read_state(["trainable"])

    found = launch(work, "gradient_norm_by_layer", backend, replicas, tmp_path / "run")
    assert_equal(found, weights)
    scalars = read_history(tmp_path / "run").scalars
    for name in weights:
        expected = {step: norms[step][name] for step in (0, 2, 4)}
        assert scalars[f"norm/{name}"] == pytest.approx(expected, rel=1e-12)


def noisy_loss(loss: float, model: Any, optimizer: Any) -> list[Any]:
    """The loss on the noisy points after the step, and the weights."""
    import torch

    inputs, labels = load("validation_sets").data().validation_sets["noisy"]
    with torch.no_grad():
        predicted = model(torch.tensor(inputs, dtype=torch.float64))
        found = torch.nn.functional.cross_entropy(predicted, torch.tensor(labels))
    weights = {each.path: each.value.detach().numpy().copy() for each in model.trainable_variables}
    return [float(found), weights]


@pytest.mark.examples
@cells("validation_sets")
def test_validation_sets(backend: str, replicas: int, tmp_path: Path) -> None:
    _, observed = plain("validation_sets", noisy_loss)
    losses = {step: each[0] for step, each in enumerate(observed, 1)}
    result = run("validation_sets", backend, replicas, tmp_path)
    found = result.history.scalars["validation_noisy_loss"]
    assert list(found) == [0, 2, 3, 4, 6]
    assert result.metrics["validation_noisy_loss"] == found[6]
    for step in (2, 3, 4, 6):
        assert found[step] == pytest.approx(losses[step], rel=1e-12)
    best = min((2, 3, 4, 6), key=losses.__getitem__)
    assert_equal(result.weights, observed[best - 1][1])


@pytest.mark.examples
@cells("evaluate_only")
def test_evaluate_only(backend: str, replicas: int, tmp_path: Path) -> None:
    example = load("evaluate_only")
    result = run("evaluate_only", backend, replicas, tmp_path)
    weights, _ = plain("evaluate_only", own_loss)
    assert_equal(result.weights, weights)
    (hidden, first), (head, last) = (
        (result.weights[f"sequential/{name}/kernel"], result.weights[f"sequential/{name}/bias"])
        for name in ("dense", "dense_1")
    )
    inputs, labels = example.points(50, seed=2)
    predicted = np.tanh(inputs @ hidden + first) @ head + last
    measured = isotrain.evaluate(
        result, (inputs, labels), metrics_over_all=example.OVER_ALL, replicas=replicas
    )
    assert measured["accuracy"] == pytest.approx(np.mean(predicted.argmax(axis=1) == labels))
    assert measured["auc"] == pytest.approx(example.auc(labels, predicted), abs=1e-12)
    counts = example.confusion(labels, predicted)
    assert counts.sum() == 50
    assert {f"confusion/{i}/{j}": counts[i, j] for i in range(3) for j in range(3)} == {
        name: value for name, value in measured.items() if name.startswith("confusion")
    }


@pytest.mark.examples
@cells("k_fold")
def test_k_fold(backend: str, replicas: int, tmp_path: Path) -> None:
    """The first fold equals the plain program; each fold is validated on other samples."""
    weights, _ = plain("k_fold", own_loss)
    result = run("k_fold", backend, replicas, tmp_path)
    assert_equal(result.weights, weights)


@pytest.mark.examples
def test_all_folds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    example, options = load("k_fold"), {"backend": "torch-ddp", "on_event": lambda event: None}
    losses = example.cross_validate(spec_of("k_fold"), **options, replicas=2)
    assert losses == pytest.approx(example.cross_validate(spec_of("k_fold"), **options, replicas=1))
    assert len(set(losses)) == example.FOLDS


def validation_loss(loss: float, model: Any, optimizer: Any) -> float:
    """The loss on the validation data after the step."""
    import torch

    inputs, targets = load("pruning").data().validation
    with torch.no_grad():
        predicted = model(torch.tensor(inputs, dtype=torch.float64))
        found = torch.nn.functional.mse_loss(predicted, torch.tensor(targets, dtype=torch.float64))
    return float(found)


@pytest.mark.examples
@cells("pruning")
def test_pruning(
    monkeypatch: pytest.MonkeyPatch, backend: str, replicas: int, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    example = load("pruning")
    expected: list[dict[int, float]] = []
    for rate in example.RATES:
        _, losses = plain("pruning", validation_loss, rate)
        trial: dict[int, float] = {}
        for step in (2, 4, 6):
            trial[step] = losses[step - 1]
            earlier = [each[step] for each in expected if step in each]
            if len(earlier) >= 2 and trial[step] > np.median(earlier):
                break
        expected.append(trial)
    assert min(map(len, expected)) < 3, "a trial is pruned"
    trials = example.search(
        spec_of("pruning"), backend=backend, replicas=replicas, on_event=lambda event: None
    )
    for trial, found in zip(expected, trials, strict=True):
        assert found == {step: pytest.approx(value, rel=1e-11) for step, value in trial.items()}


@pytest.mark.examples
@cells("profiler")
def test_profiler(backend: str, replicas: int, tmp_path: Path) -> None:
    weights, _ = plain("profiler", own_loss)
    result = run("profiler", backend, replicas, tmp_path)
    assert_equal(result.weights, weights)
    processes = len(result.plan["processes"])
    for rank in range(processes):
        folder = result.run_directory / "profile" / f"rank-{rank}"
        traces = [*folder.rglob("*.xplane.pb"), *folder.rglob("trace.json")]
        assert [trace for trace in traces if trace.stat().st_size > 1000]
