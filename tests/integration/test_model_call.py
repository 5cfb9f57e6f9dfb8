"""Models that are called by keywords or by a function: steps, evaluation, predictions and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.errors import RunFailedError, SpecError

INPUTS = {
    "left": np.arange(24, dtype="float32").reshape(8, 3) / 24,
    "right": np.cos(np.arange(24, dtype="float32")).reshape(8, 3),
}
TARGETS = INPUTS["left"].sum(axis=1, keepdims=True)


def torch_model() -> Any:
    import torch
    from torch import nn

    class Difference(nn.Module):
        """A linear function of the difference of two inputs that have names."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)
            with torch.no_grad():
                self.linear.weight.copy_(torch.tensor([[0.5, -0.25, 0.125]]))
                self.linear.bias.zero_()

        def forward(self, *, left: Any, right: Any) -> Any:
            return self.linear(left - right)

    return Difference()


def tensorflow_model() -> Any:
    import tensorflow as tf

    class Difference(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable([[0.5], [-0.25], [0.125]])
            self.bias = tf.Variable([0.0])

        def __call__(self, *, left: Any, right: Any) -> Any:
            return (left - right) @ self.weight + self.bias

    return Difference()


def by_function(model: Any, inputs: Any) -> Any:
    return model(**inputs)


def spec(**fields: Any) -> isotrain.TrainingSpec:
    data = isotrain.sources.arrays(inputs=INPUTS, targets=TARGETS)
    defaults = {
        "model": {"torch": torch_model, "tensorflow": tensorflow_model},
        "data": isotrain.DataSet(data, data),
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 4,
        "steps": 3,
        "shuffle": False,
        "threads": 1,
    }
    return isotrain.TrainingSpec(**defaults | fields)


def expected_weights() -> np.ndarray:
    """Weights, then the bias, after the three steps of gradient descent."""
    difference = INPUTS["left"].astype("float64") - INPUTS["right"]
    features = np.concatenate([difference, np.ones((8, 1))], axis=1)
    weights = np.array([0.5, -0.25, 0.125, 0.0])
    for start in (0, 4, 0):
        x, y = features[start : start + 4], TARGETS[start : start + 4, 0]
        weights = weights - 0.125 * 2 / 4 * x.T @ (x @ weights - y)
    return weights


@pytest.mark.parametrize("call", ["keywords", by_function], ids=["keywords", "function"])
@pytest.mark.parametrize(
    "backend", ["torch-ddp", pytest.param("tf-mirrored", marks=pytest.mark.slow)]
)
def test_is_called_alike_everywhere(call: Any, backend: str, tmp_path: Path) -> None:
    result = isotrain.run(spec(call=call), backend=backend, replicas=2, output=tmp_path / "run")
    trained = np.concatenate([result.weights[n].ravel() for n in sorted(result.weights)[::-1]])
    expected = expected_weights()
    np.testing.assert_allclose(trained, expected, atol=1e-6)
    features = np.concatenate([INPUTS["left"] - INPUTS["right"], np.ones((8, 1))], axis=1)
    predicted = features @ expected
    loss = np.mean((predicted - TARGETS[:, 0]) ** 2)
    assert result.metrics["validation_loss"] == pytest.approx(loss, rel=1e-5)
    predictions = isotrain.predict(result, INPUTS, spec=spec(call=call))
    np.testing.assert_allclose(predictions[:, 0], predicted, atol=1e-6)


@pytest.mark.features
def test_onnx_has_the_inputs_of_the_call(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    trained = spec(call="keywords")
    result = isotrain.run(trained, backend="torch-ddp", replicas=1, output=tmp_path / "run")
    result.export(tmp_path / "model.onnx", data=INPUTS, spec=trained)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [each.name for each in session.get_inputs()]
    (outputs,) = session.run(None, dict(zip(names, INPUTS.values(), strict=True)))
    predictions = isotrain.predict(result, INPUTS, spec=trained)
    np.testing.assert_allclose(outputs, predictions, atol=1e-6)


def test_keywords_need_inputs_with_names(tmp_path: Path) -> None:
    unnamed = isotrain.DataSet((INPUTS["left"], TARGETS))
    with pytest.raises(RunFailedError, match="call: keywords needs inputs with names, a dict"):
        isotrain.run(
            spec(call="keywords", data=unnamed),
            backend="torch-ddp",
            replicas=1,
            output=tmp_path / "run",
        )


def test_a_misspelled_word_is_refused() -> None:
    with pytest.raises(SpecError, match=r"call: got 'keyword'; expected keywords, "):
        spec(call="keyword")
