"""A session of a portable model: its losses, metrics, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from integration.session_specs import launch, net, samples

import isotrain

pytestmark = pytest.mark.usefixtures("reference")


def flat_predictions() -> Any:
    import keras

    inputs = keras.Input((3,))
    score = keras.layers.Dense(1, activation="sigmoid")(inputs)
    return keras.Model(inputs, keras.layers.Reshape(())(score))


def labelled() -> tuple[np.ndarray, np.ndarray]:
    inputs, _ = samples()
    return inputs, (inputs[:, 0] > 0).astype("float32")


def no_optimizer(learning_rate: float) -> object:
    return object()


def by_a_function(learning_rate: float) -> Any:
    import keras

    return keras.optimizers.SGD(lambda: learning_rate)


def of_parameters(parameters: Any, lr: float) -> Any:
    """As for a native torch model."""


def on_keras(session: isotrain.Session) -> dict[str, Any]:
    """What is asked below of a portable model."""
    from isotrain.adapters.keras import model as keras_model

    def refusal(build: Any, **changes: Any) -> str:
        try:
            build(session.spec.replace(**changes), "torch")
        except isotrain.SpecError as error:
            return str(error)
        return ""

    inputs, labels = labelled()
    found: dict[str, Any] = {
        "losses": [float(session.step(batch)) for batch in session.batches()],
        "training": session.metrics(),
        "evaluation": session.evaluate((inputs, labels)),
    }
    outputs = session.group.model(session.group.to_device(inputs.astype("f4")))
    found["right"] = float(np.mean((session.group.numpy(outputs) > 0.5) == (labels > 0.5)))
    twice = ["mean_squared_error", "mean_squared_error"]
    found["refusals"] = [
        refusal(keras_model.build_metrics, metrics=["mse_of_nothing"]),
        refusal(keras_model.build_metrics, metrics=twice),
        refusal(keras_model.build_optimizer, optimizer={"custom": no_optimizer, "lr": 0.5}),
        refusal(keras_model.build_optimizer, optimizer={"custom": by_a_function, "lr": 0.5}),
        refusal(keras_model.build_optimizer, optimizer={"custom": of_parameters, "lr": 0.5}),
    ]
    compute = keras_model.loss_computer(session.spec, net(), "torch", training=True)
    try:
        compute({"image": session.group.to_device(inputs)}, None)
    except isotrain.SpecError as error:
        found["refusals"].append(str(error))
    return found


@pytest.fixture(scope="module")
def portable_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of a portable model, with AdamW without decay and metrics of several kinds."""
    found: dict[str, Any] = launch(
        on_keras,
        tmp_path_factory.mktemp("portable"),
        backend="torch-ddp",
        model=flat_predictions,
        data=labelled,
        loss="binary_crossentropy",
        metrics=["accuracy", "AUC", "precision"],
        optimizer={"name": "adamw", "weight_decay": 0.0},
        evaluation={"batch": 5},
    )
    return found


@pytest.mark.slow
def test_adamw_without_decay_trains(portable_run: dict[str, Any]) -> None:
    assert len(set(portable_run["losses"])) == 9


def test_accuracy_of_one_number_per_sample_does_not_depend_on_the_split(
    portable_run: dict[str, Any],
) -> None:
    assert portable_run["evaluation"]["accuracy"] == pytest.approx(portable_run["right"])


def test_metrics_have_the_same_names_in_training_and_evaluation(
    portable_run: dict[str, Any],
) -> None:
    assert list(portable_run["training"]) == ["accuracy", "auc", "precision"]
    assert list(portable_run["evaluation"]) == ["loss", *portable_run["training"]]


def test_errors_that_need_the_framework(portable_run: dict[str, Any]) -> None:
    metric, twice, optimizer, rate, call, inputs = portable_run["refusals"]
    assert "of_parameters' cannot be called as (learning_rate, **args)" in call
    assert "its optimizer is a 'function', which does not know the step" in rate
    assert "the inputs are a dict, and the model is a keras.Sequential" in inputs
    assert "unknown Keras metrics name 'mse_of_nothing'" in metric
    assert "more than one result would be called mean_squared_error" in twice
    assert "must return a Keras optimizer" in optimizer
