"""Predictions with the model of a finished run: any backend, any number of replicas, any output."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers.in_process import command

import isotrain
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.safetensors_file import SafetensorsFile
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.data.batch import Batch
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Branch, Network

pytestmark = pytest.mark.usefixtures("reference")

SAMPLES = np.random.default_rng(7).standard_normal((23, 4))


def network() -> Network:
    return Network([Dense(4, 8, "tanh", name="hidden"), Dense(8, 3, name="head")])


def two_outputs() -> Network:
    one = Branch("features", [Dense(4, 3, name="one")])
    return Network({"one": one, "two": Branch("features", [Dense(4, 1, name="two")])})


def portable() -> Any:
    import keras
    from keras import layers

    inputs = keras.Input((4,))
    hidden = layers.Dense(8, activation="tanh", name="hidden")(inputs)
    return keras.Model(inputs, layers.Dense(3, name="head")(hidden))


def data() -> isotrain.DataSet:
    """Predicted for is the validation part."""
    return isotrain.DataSet((SAMPLES[5:], np.arange(18) % 3), (SAMPLES, np.arange(23) % 3))


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": {"numpy": network, "torch": portable, "tensorflow": portable},
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.125},
        "precision": "float64",
        "global_batch_size": 7,
        "epochs": 1,
        "threads": 1,
        "device": "cpu",
    }
    return fields | changes


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> isotrain.RunResult:
    folder = tmp_path_factory.mktemp("trained") / "run"
    return run(spec(), backend="reference", replicas=2, output=folder)


run = functools.partial(isotrain.run, on_event=lambda event: None)


def expected(weights: dict[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
    hidden = np.tanh(inputs @ weights["hidden/kernel"] + weights["hidden/bias"])
    logits: np.ndarray = hidden @ weights["head/kernel"] + weights["head/bias"]
    return logits


@pytest.mark.kernels
@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 7, 23])
def test_any_number_of_replicas_predicts_the_same(
    result: isotrain.RunResult, replicas: int, count: int
) -> None:
    found = isotrain.predict(result, SAMPLES[:count], replicas=replicas)
    wanted = expected(result.weights, SAMPLES[:count])
    np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_frameworks_predict_the_same(result: isotrain.RunResult, backend: str) -> None:
    found = isotrain.predict(result.run_directory, data, spec=spec(), backend=backend, replicas=2)
    np.testing.assert_allclose(found, expected(result.weights, SAMPLES), rtol=1e-12, atol=1e-13)


def test_targets_are_ignored_and_several_outputs_kept_apart(tmp_path: Path) -> None:
    changes = {"model": {"numpy": two_outputs}, "objective": objective, "loss": None}
    fields = {name: value for name, value in spec(**changes).items() if value is not None}
    trained = run(
        fields | {"data": {"features": SAMPLES}}, backend="reference", output=tmp_path / "r"
    )
    inputs = {"features": SAMPLES[:6]}
    found = isotrain.predict(trained, (inputs, np.zeros(6)), replicas=4)
    weights = trained.weights
    for name in ("one", "two"):
        wanted = SAMPLES[:6] @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]
        np.testing.assert_allclose(found[name], wanted, rtol=1e-13, atol=1e-13)


def objective(network: Network, batch: Any) -> Any:
    outputs = network(batch[0])
    return outputs["one"][:, 0], outputs["one"], {"one": np.ones_like(outputs["one"])}


def test_a_session_predicts_batch_by_batch(tmp_path: Path) -> None:
    (found, _) = isotrain.launch(
        predictions_in_a_loop,
        spec(checkpoint={}),
        backend="reference",
        replicas=2,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    assert found["sizes"] == [7, 7, 7, 2]
    np.testing.assert_array_equal(found["in batches"], found["at once"])
    np.testing.assert_allclose(
        found["at once"], expected(found["weights"], SAMPLES), rtol=1e-13, atol=1e-13
    )
    afterwards = isotrain.predict(tmp_path / "run", SAMPLES)  # of its checkpoint, by its own spec
    np.testing.assert_allclose(afterwards, found["at once"], rtol=1e-13, atol=1e-13)


def predictions_in_a_loop(session: isotrain.Session) -> dict[str, Any]:
    reading = session.predictions()
    next(reading)
    for batch in session.batches():
        if batch.step == 0:
            _refuse_while_predictions_are_read(session, batch)
            reading.close()
        session.step(batch)
    session.save()
    parts = list(session.predictions())
    return {
        "sizes": [len(part) for part in parts],
        "in batches": np.concatenate(parts),
        "at once": session.predict(SAMPLES),
        "weights": session.read_state(["trainable"]),
    }


def _refuse_while_predictions_are_read(session: isotrain.Session, batch: Batch) -> None:
    """Their end would take back what the step did, and a checkpoint would hold what they moved."""
    with pytest.raises(
        isotrain.IsotrainError, match=r"step: an iterator of session\.predictions is open"
    ):
        session.step(batch)
    for save in (session.save, session.save_if_due):
        with pytest.raises(
            isotrain.IsotrainError, match=r"save.*: an iterator of session\.predictions is open"
        ):
            save()


def test_an_output_without_a_row_for_each_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(isotrain.RunFailedError, match=r"shape \(\) for 4 samples"):
        isotrain.launch(
            predict_sums,
            spec(),
            backend="reference",
            replicas=2,
            output=tmp_path / "run",
            on_event=lambda event: None,
        )


def predict_sums(session: isotrain.Session) -> None:
    group: Any = session.group
    group.predict = lambda inputs: [np.zeros(()) for _ in inputs]
    session.predict()


@pytest.mark.kernels
def test_a_model_that_cannot_be_imported_must_be_given(tmp_path: Path) -> None:
    def local() -> Network:
        return network()

    unnamed = run(spec(model={"numpy": local}), backend="reference", output=tmp_path / "r")
    with pytest.raises(isotrain.SpecError, match="Pass the spec that was run"):
        isotrain.predict(unnamed, SAMPLES)
    found = isotrain.predict(unnamed, SAMPLES, spec=spec(model={"numpy": local}))
    np.testing.assert_allclose(
        found, expected(unnamed.weights, SAMPLES), rtol=1e-13, atol=1e-13
    )  # it predicts batch by batch


def test_a_checkpoint_predicts_as_the_run_did_then(
    result: isotrain.RunResult, tmp_path: Path
) -> None:
    """The model is that of the given spec, whatever the checkpoint names."""
    then = {name: value / 2 for name, value in result.weights.items()}
    parts = {name: TensorPart(value) for name, value in then.items()}
    slots = {"optimizer/momentum": TensorPart(np.zeros(3))}
    told = {"model": "os:abort", "plugins": ["antigravity"], "evaluation": {"batch": "none"}}
    checkpoint = CheckpointFolder(tmp_path / "checkpoints").save(
        7, sections={"state": parts | slots}, run={"spec": told, "plan": result.plan}
    )
    wanted = expected(then, SAMPLES)
    own = result.run_directory
    for source, given in ((tmp_path, own), (checkpoint.location, str(own)), (checkpoint, spec())):
        found = isotrain.predict(source, SAMPLES, spec=given, replicas=2)
        np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-13)
    isotrain.export(checkpoint, tmp_path / "then.safetensors")
    kept = SafetensorsFile(tmp_path / "then.safetensors").read_all()
    assert kept.keys() == then.keys()
    for name, value in then.items():
        np.testing.assert_array_equal(kept[name], value)


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(isotrain.IsotrainError, match="expected the directory of a run"):
        isotrain.predict(tmp_path, SAMPLES)


MODEL = """
from isotrain.core.data.batch import Batch
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network


def model():
    return Network([Dense(4, 3, name="head")])
"""


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    np.save(tmp_path / "samples.npy", SAMPLES)
    changes = {"model": f"{tmp_path}/mine.py:model", "plugins": ["isotrain.testing.reference"]}
    result = run(spec(**changes), backend="reference", output=tmp_path / "run")
    files = ("run", "--data", "samples.npy", "--output", "new/found.npy")
    done = command("predict", *files, "--replicas", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    wanted = SAMPLES @ result.weights["head/kernel"] + result.weights["head/bias"]
    np.testing.assert_allclose(
        np.load(tmp_path / "new" / "found.npy"), wanted, rtol=1e-13, atol=1e-13
    )
    files = ("run", "--data", "missing.npy", "--output", "newer/and/found.npy")
    assert command("predict", *files, folder=tmp_path).returncode
    assert not (tmp_path / "newer").exists(), "nothing was written into it"


class Named(NamedTuple):
    logits: Any
    hidden: Any


@dataclasses.dataclass
class Output:
    """As models of libraries give it: what was not asked for is None."""

    logits: Any
    named: Named
    loss: Any = None


def structured(outputs: Any) -> Any:
    import torch

    class Structured(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 3)

        def forward(self, inputs: Any) -> Any:
            logits = self.head(inputs)
            return Output(logits, Named(logits + 1, None)) if outputs else (logits, None, [logits])

    return Structured()


def structured_in_keras(outputs: Any) -> Any:
    import keras

    class Structured(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            logits = self.head(inputs)
            return Output(logits, Named(logits + 1, None)) if outputs else (logits, None, [logits])

    model = Structured()
    model.head.build((None, 4))
    model.built = True
    return model


def logits_loss(model: Any, batch: Any) -> Any:
    found = model(batch[0])
    logits = found.logits if hasattr(found, "logits") else found[0]
    return (logits**2).mean()


def logits_loss_in_keras(model: Any, batch: Any) -> Any:
    from keras import ops

    found = model(batch[0])
    return ops.mean(ops.square(found.logits if hasattr(found, "logits") else found[0]))


def predictions(session: isotrain.Session, name: str) -> Any:
    for batch in session.batches():
        session.step(batch)
    return session.predict()


@pytest.mark.parametrize(
    "backend", ["torch-ddp", pytest.param("tf-mirrored", marks=pytest.mark.slow)]
)
def test_outputs_of_any_form(backend: str) -> None:
    model = {"torch": structured, "tensorflow": structured_in_keras}
    objective = {"torch": logits_loss, "tensorflow": logits_loss_in_keras}
    given = spec(model=model, objective=objective) | {"loss": None}
    specs = {
        name: given | {"model_args": {"outputs": name == "classes"}} for name in ("classes", "none")
    }
    found = launched_in_turn(specs, predictions, backend, 2)[0]
    classes, (logits, nothing, (again,)) = found["classes"], found["none"]
    assert set(classes) == {"logits", "named"}
    assert classes["logits"].shape == logits.shape == (23, 3)
    np.testing.assert_array_equal(classes["named"]["logits"], classes["logits"] + 1)
    assert nothing is None
    np.testing.assert_array_equal(again, logits)
