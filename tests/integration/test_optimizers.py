"""What the spec says of its optimizers is what the real ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated
from integration import optimizer_groups, sgd_updates

import isotrain
from isotrain.core.spec.loading import load_spec

pytestmark = pytest.mark.slow

OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.5},
    {"name": "sgd", "momentum": 0.5, "nesterov": True},
    {"name": "adam"},
    {"name": "adam", "amsgrad": True},
    {"name": "adamw"},
    {"name": "rmsprop"},
    {"name": "rmsprop", "momentum": 0.5},
    {"name": "rmsprop", "centered": True},
    {"name": "rmsprop", "momentum": 0.5, "centered": True},
    {"name": "adagrad"},
    {"name": "lamb"},
    {"name": "lion"},
    {"name": "muon"},
    {"name": "nadam"},
    {"name": "radam"},
]
SPEC: dict[str, Any] = {
    "data": (np.ones((1, 2)), np.ones((1, 1))),
    "loss": "mse",
    "global_batch_size": 1,
    "steps": 1,
}


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def seen(session: isotrain.Session) -> tuple[Any, ...]:
    """The slots of each optimizer, and updates by torch's SGD and by groups."""
    session.close()
    of_each = [slots({"lr": 0.1, **optimizer}) for optimizer in OPTIMIZERS]
    return of_each, sgd_updates.seen(session.spec), optimizer_groups.seen(session)


def slots(fields: dict[str, Any]) -> list[Any]:
    """What the spec says, what Keras names, and how many torch has."""
    import keras
    import torch

    from isotrain.adapters.keras import model as keras_model
    from isotrain.adapters.torch.optim.native import build_optimizer

    spec = load_spec({**SPEC, "model": model, "optimizer": fields})
    weight = keras.Variable([1.0, 2.0], name="w")
    optimizer, _ = keras_model.build_optimizer(spec, "torch")
    optimizer.build([weight])
    named = [v.path.rpartition("/w_")[2] for v in optimizer.variables if "/w_" in v.path]
    own = torch.nn.Parameter(torch.ones(2))
    native = build_optimizer(spec, [own])
    own.grad = torch.ones(2)
    native.step()
    kept = [slot for slot in native.state[own].values() if torch.is_tensor(slot) and slot.dim()]
    return [list(spec.optimizer.slots), named, len(kept)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = {**SPEC, "model": model, "optimizer": {"name": "sgd", "lr": 0.1}}
    return run_isolated(seen, spec, "torch-ddp", tmp_path_factory.mktemp("optimizers") / "run")


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)), ids=lambda i: str(OPTIMIZERS[i]))
def test_slots_are_those_of_keras_and_as_many_as_of_torch(found: Any, index: int) -> None:
    said, named, count = found[0][index]
    assert sorted(said) == sorted(named)
    assert len(said) == count


@pytest.mark.kernels
def test_updates_are_those_of_the_optimizers_own_steps(found: Any) -> None:
    """They are equal to the bit; `step` itself runs only where it does more."""
    wrong = {name: seen for name, seen in found[1].items() if seen[0] is False}
    assert not wrong
    others = {name: seen for name, seen in found[1].items() if seen[1] != seen[2]}
    assert not others


@pytest.mark.parametrize(
    "index",
    range(len(optimizer_groups.OPTIMIZERS)),
    ids=lambda i: str(optimizer_groups.OPTIMIZERS[i]),
)
def test_groups_are_updated_as_by_an_optimizer_each(found: Any, index: int) -> None:
    """Keras multiplies the rate of a group by its factor; the plain optimizer was given the product."""
    differences = found[2][index]
    assert differences["keras"] < 1e-6
    assert differences["kernels"] < 1e-6
    assert differences["torch"] == 0


def regression() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(size=(40, 2))
    return inputs, np.sin(inputs.sum(1, keepdims=True))


def adam_by_hand(session: isotrain.Session) -> list[Any]:
    """Weights by the session; and by NumPy, with the betas rounded to float32 and exact ones."""
    read = session.group.numpy
    start = session.read_state(("trainable",))
    by_hand: list[list[np.ndarray]] = [[array.copy() for array in start.values()] for _ in "re"]
    slots = [[np.zeros_like(each) for each in start.values() for _ in range(2)] for _ in "re"]
    for batch in session.batches():
        inputs, targets = map(read, (batch.slices[0][0].inputs, batch.slices[0][0].targets))
        for is_exact, (kernel, bias) in enumerate(by_hand):
            error = 2 * (inputs @ kernel + bias - targets) / len(inputs)
            gradients = inputs.T @ error, error.sum(0)
            betas = [beta if is_exact else float(np.float32(beta)) for beta in (0.9, 0.999)]
            first, second = (1 - beta ** (batch.step + 1) for beta in betas)
            for index, gradient in enumerate(gradients):
                mean, square = slots[is_exact][2 * index : 2 * index + 2]
                mean += (gradient - mean) * (1 - betas[0])
                square += (gradient**2 - square) * (1 - betas[1])
                rate = 0.0625 * np.sqrt(second) / first
                epsilon = float(np.float32(1e-7))
                (kernel, bias)[index][...] -= rate * mean / (np.sqrt(square) + epsilon)
        session.step(batch)
    return [list(session.read_state(("trainable",)).values()), *by_hand]


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_adam_has_betas_of_float32_in_float64(backend: str, tmp_path: Path) -> None:
    spec = {
        **SPEC,
        "model": model,
        "data": regression,
        "optimizer": {"name": "adam", "lr": 0.0625},
        "precision": "float64",
        "global_batch_size": 8,
        "steps": 10,
        "threads": 1,
    }
    ours, rounded, exact = isotrain.launch(
        adam_by_hand, spec, backend=backend, replicas=1, output=tmp_path / "run"
    )[0]
    for array, expected, other in zip(ours, rounded, exact, strict=True):
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-14)
        assert 1e-12 < np.abs(array - other).max() < 1e-6
