"""A person's own loss is called in its own order, and never broadcasts targets against predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain import RunFailedError, SpecError

SAMPLES = 32


def network() -> Any:
    """One output per sample, of shape [N, 1]."""
    import torch

    torch.manual_seed(3)
    return torch.nn.Linear(2, 1)


def portable_network() -> Any:
    """The same network in Keras."""
    import keras

    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="out")])


def points(column: bool = True, kind: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Points, and whether they lie above a line."""
    inputs = np.random.default_rng(5).normal(size=(SAMPLES, 2)).astype("float32")
    above = (inputs[:, 0] > inputs[:, 1]).astype(kind)
    return inputs, above[:, None] if column else above


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": {"torch": network},
        "data": points,
        "optimizer": {"name": "sgd", "lr": 0.5},
        "global_batch_size": 16,
        "epochs": 4,
        "threads": 1,
    }
    return {**fields, **changes}


def y_then_prediction(y_true: Any, y_pred: Any) -> Any:
    return (y_pred - y_true) ** 2


def prediction_then_y(output: Any, target: Any) -> Any:
    return ((output - target) ** 2 * (1 + target)).mean()


def prediction_then_y_in_other_words(a: Any, b: Any) -> Any:
    return prediction_then_y(a, b)


def outer(targets: Any, predictions: Any) -> Any:
    """A matrix: each target against each prediction."""
    return targets.reshape(-1, 1) - predictions.reshape(1, -1)


def trained(tmp_path: Path, **changes: Any) -> list[float]:
    """The losses of a run."""
    fields = spec(**changes)
    found = isotrain.run(fields, backend="torch-ddp", output=tmp_path, on_event=print)
    return found.history.loss


@pytest.mark.features
def test_a_function_of_torch_gets_the_predictions_first(tmp_path: Path) -> None:
    losses = trained(tmp_path, loss="torch.nn.functional:binary_cross_entropy_with_logits")
    assert min(losses) > 0
    assert losses[-1] < losses[0]


def orders(session: isotrain.Session) -> dict[str, Any]:
    """What is found out about the order of functions of torch, Keras and people."""
    import functools

    import keras
    import torch
    from torch.nn import functional

    from isotrain.adapters.common import callables

    class Wrapped(torch.nn.Module):
        def forward(self, logits: Any, labels: Any) -> Any:
            return functional.cross_entropy(logits, labels)

    functions = {
        "cross_entropy": functional.cross_entropy,
        "hinge_embedding_loss": functional.hinge_embedding_loss,
        "MSELoss": torch.nn.MSELoss(),
        "partial": functools.partial(functional.huber_loss, delta=2.0),
        "own module": Wrapped(),
        "y_pred first": lambda y_pred, y_true: y_pred,
        "x, y": lambda x, y: x,
        "keras": keras.losses.mean_squared_error,
        "y_true first": y_then_prediction,
        "t, p": lambda t, p: t,
        "labels, logits": lambda labels, logits: labels,
        "y, yHat": lambda y, yHat: y,
        "a, b": lambda a, b: a,
        "y, ys": lambda y, ys: y,
        "stars": lambda *values: values[0],
    }
    return {name: callables.argument_order_of(function) for name, function in functions.items()}


@pytest.mark.features
def test_argument_order_follows_names_and_origin() -> None:
    (found,) = isotrain.launch(orders, spec(loss="mse"), backend="torch-ddp", replicas=1)
    names = list(found)
    first, last = names.index("keras"), names.index("a, b")
    assert {found[name] for name in names[:first]} == {"predictions-first"}
    assert {found[name] for name in names[first:last]} == {"targets-first"}
    assert {found[name] for name in names[last:]} == {None}


@pytest.mark.features
def test_an_ambiguous_argument_order_must_be_given(tmp_path: Path) -> None:
    undecided = prediction_then_y_in_other_words
    with pytest.raises(RunFailedError, match=r"takes \(a, b\).*order: targets-first"):
        trained(tmp_path / "refused", loss=undecided)
    said = trained(tmp_path / "said", loss={"call": undecided, "order": "predictions-first"})
    turned = {"call": undecided, "order": "targets-first"}
    other = trained(tmp_path / "other", loss=turned, on_nan="ignore")  # away from the targets
    assert said == trained(tmp_path / "named", loss=prediction_then_y)
    assert said != other


@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_a_native_loss_does_not_broadcast(tmp_path: Path, kind: str) -> None:
    args = {"column": False, "kind": kind}
    with pytest.raises(RunFailedError, match=r"targets of shape \[16\].*shape \[16, 1\]"):
        trained(tmp_path, loss=y_then_prediction, data_args=args)


@pytest.mark.features
@pytest.mark.parametrize(
    "backend", ["torch-ddp", pytest.param("tf-mirrored", marks=pytest.mark.features)]
)
def test_a_portable_loss_gets_equal_shapes_as_in_keras(tmp_path: Path, backend: str) -> None:
    losses = [
        isotrain.run(
            spec(model=portable_network, loss=y_then_prediction, data_args={"column": column}),
            backend=backend,
            output=tmp_path / str(column),
            on_event=print,
        ).history.loss
        for column in (True, False)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (outer, r"returned shape \[16, 16\]"),
        (lambda targets, predictions: None, "returned 'NoneType'; expected a tensor"),
        (lambda targets, predictions: 1.0, "returned 'float'; expected a tensor"),
        (lambda targets, predictions: np.float32(1), "returned 'float32'; expected a tensor"),
    ],
    ids=["matrix", "none", "float", "numpy"],
)
def test_return_values_of_a_loss(tmp_path: Path, loss: Any, complaint: str) -> None:
    with pytest.raises(RunFailedError, match=complaint):
        trained(tmp_path, loss=loss)


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        ({"call": "m:f"}, "loss.order: got None; expected targets-first or predictions-first"),
        ({"call": "m:f", "order": "backwards"}, "loss.order: got 'backwards'"),
        ({"call": "mse", "order": "targets-first"}, "loss.call: got 'mse'; expected"),
    ],
)
def test_an_argument_order_is_for_callables(loss: Any, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        isotrain.plan(spec(loss=loss), backend="torch-ddp")
