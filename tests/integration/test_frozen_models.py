"""Frozen models of earlier runs: on every backend they compute what `isotrain.predict` of that run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.errors import RunFailedError, SpecError


def teacher(units: int) -> Any:
    """A Keras model with weights that training moves in each way."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(units), layers.BatchNormalization(), layers.Dropout(0.5)]
    )


def torch_teacher(units: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(3, units), nn.BatchNorm1d(units), nn.Dropout(0.5))


def tensorflow_teacher(units: int) -> Any:
    import tensorflow as tf

    class Module(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = tf.Variable(tf.ones((3, units), tf.float64), name="kernel")

        def __call__(self, inputs: Any, training: bool = False) -> Any:
            return inputs @ self.kernel

    return Module()


def student() -> Any:
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def samples() -> isotrain.DataSet:
    inputs = np.random.default_rng(0).normal(size=(12, 3))
    targets = np.repeat(inputs[:, :1], 5, axis=1)
    return isotrain.DataSet((inputs, targets), (inputs[:7], targets[:7]))


def taught(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    from keras import ops

    return ops.sum(step.frozen["teacher"](batch[0]), axis=-1) + 0 * ops.sum(model(batch[0]))


def fields(**changes: Any) -> dict[str, Any]:
    common = {"data": samples, "optimizer": {"name": "sgd", "lr": 0.125}, "precision": "float64"}
    return {**common, "global_batch_size": 4, "epochs": 1, **changes}


def trained(folder: Path, model: Any, backend: str) -> isotrain.RunResult:
    spec = fields(model=model, model_args={"units": 5}, loss="mean_squared_error")
    return isotrain.run(spec, backend=backend, replicas=1, output=folder / "teacher")


def evaluate(session: isotrain.Session) -> float:
    return session.evaluate()["loss"]


CASES = {
    "from torch": (teacher, "torch-ddp"),
    "from TensorFlow": (teacher, "tf-multiworker"),
    "native torch": ({"torch": torch_teacher}, "torch-ddp"),
    "native TensorFlow": ({"tensorflow": tensorflow_teacher}, "tf-mirrored"),
}


@pytest.mark.parametrize(
    ("case", "backends"),
    [
        ("native torch", ["torch-ddp"]),
        *(
            pytest.param(*each, marks=pytest.mark.features)
            for each in (
                ("from torch", ["tf-mirrored", "horovod-tf"]),
                ("from TensorFlow", ["torch-ddp", "horovod-torch"]),
                ("native TensorFlow", ["tf-mirrored"]),
            )
        ),
    ],
)
def test_the_weights_are_those_of_the_run(tmp_path: Path, case: str, backends: list[str]) -> None:
    result = trained(tmp_path, *CASES[case])
    expected = isotrain.predict(result, samples().validation[0], replicas=1).sum(-1).mean()
    spec = fields(model=student, objective=taught, frozen={"teacher": result})
    for backend in backends:
        losses = isotrain.launch(evaluate, spec, backend=backend, replicas=2)
        assert losses[0] == pytest.approx(expected, rel=1e-12), backend


def wider(units: int) -> Any:
    return torch_teacher(units + 1)


def test_another_model_and_no_run_are_refused(tmp_path: Path) -> None:
    result = trained(tmp_path, {"torch": torch_teacher}, "torch-ddp")
    spec_file = result.run_directory / "spec.json"
    spec_file.write_text(spec_file.read_text().replace("torch_teacher", "wider"))
    spec = fields(model=student, objective=taught, frozen={"teacher": result.run_directory})
    with pytest.raises(RunFailedError, match=r"frozen.teacher: the run has no .*: 0\.weight"):
        isotrain.launch(evaluate, spec, backend="torch-ddp", replicas=1)
    with pytest.raises(SpecError, match=r"frozen\.teacher: .*directory of a run"):
        isotrain.TrainingSpec(**{**spec, "frozen": {"teacher": tmp_path / "none"}})
